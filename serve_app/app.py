"""The whole graph of the application: router -> engine replicas, and the controller of their weights."""

from dataclasses import asdict
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.schema import LoggingConfig

from serve_app.controller import WeightController
from serve_app.replica import EngineReplica
from serve_app.router import Router
from serve_app.routing.work_router import WorkRouter
from serve_app.scaling.decision import ScalingTargets
from serve_app.scaling.work_policy import WorkPolicy
from serve_app.settings import AppSettings, ReplicaSettings

MAX_ONGOING_REQUESTS = 10_000
"""Of router and controller: nobody waits in Serve's queues, which poll; limits are kept where they can be explained."""


def build_app(settings: AppSettings) -> serve.Application:
    """Gives the application that `serve run` and `serve.run` start; `settings` are the `args:` of the config file."""
    controller = WeightController.options(  # type: ignore[attr-defined]
        num_replicas=1,
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        ray_actor_options={"num_cpus": 0},
        logging_config=LoggingConfig(enable_access_log=False),
        graceful_shutdown_timeout_s=1.0,
    ).bind(settings)
    engine = EngineReplica.options(**engine_options(settings)).bind(  # type: ignore[attr-defined]
        settings, controller
    )
    return Router.options(  # type: ignore[attr-defined, no-any-return]
        num_replicas=settings.routing.num_routers,
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=settings.replicas.graceful_shutdown_timeout_s,
    ).bind(settings, engine, controller)


def engine_options(settings: AppSettings) -> dict[str, Any]:
    """Gives Serve's options of the deployment of engine replicas."""
    replicas = settings.replicas
    scale: dict[str, Any] = {"num_replicas": replicas.min}
    if replicas.is_autoscaled:
        scale = {"autoscaling_config": _autoscaling(settings)}
    return {
        **scale,
        "max_ongoing_requests": replicas.max_ongoing_requests,
        "ray_actor_options": {"num_cpus": replicas.num_cpus, "num_gpus": replicas.num_gpus},
        **_placement(replicas),
        "request_router_config": RequestRouterConfig(
            request_router_class=WorkRouter,  # type: ignore[arg-type]  # wrongly inferred from Ray's serializer
            request_router_kwargs={"policy": settings.routing.policy},
            request_routing_stats_period_s=settings.routing.stats_period_s,  # type: ignore[arg-type]
        ),
        "health_check_period_s": replicas.health_check_period_s,
        "health_check_timeout_s": replicas.health_check_timeout_s,
        "graceful_shutdown_timeout_s": replicas.graceful_shutdown_timeout_s,
        "graceful_shutdown_wait_loop_s": 0.5,
        "logging_config": LoggingConfig(enable_access_log=False),
    }


def _placement(replicas: ReplicaSettings) -> dict[str, Any]:
    """Has Ray place the ranks of a replica together: the replica in the first bundle, its actors in the others."""
    if replicas.tensor_parallel_size == 1:
        return {}
    bundle = {"CPU": replicas.num_cpus, "GPU": replicas.num_gpus}
    bundle = {resource: amount for resource, amount in bundle.items() if amount}
    return {
        "placement_group_bundles": [bundle] * replicas.tensor_parallel_size,
        "placement_group_strategy": "STRICT_PACK",
    }


def _autoscaling(settings: AppSettings) -> AutoscalingConfig:
    scaling, replicas = settings.autoscaling, settings.replicas
    targets = ScalingTargets(
        minimum=replicas.min,
        maximum=replicas.max,
        first_token_s=scaling.target_first_token_s,
        token_time_s=scaling.target_token_time_s,
        kv_usage=scaling.target_kv_usage,
        work_s=scaling.target_work_s,
        utilisation=scaling.target_utilisation,
        up_after_s=scaling.upscale_delay_s,
        down_after_s=scaling.downscale_delay_s,
        start_s=scaling.startup_s,
        idle_s=scaling.idle_s,
    )
    return AutoscalingConfig(
        min_replicas=replicas.min,
        max_replicas=replicas.max,
        # The policy itself says when, and why; Serve's own delays would only hide it.
        upscale_delay_s=0,
        downscale_delay_s=0,
        metrics_interval_s=scaling.metrics_interval_s,
        look_back_period_s=scaling.look_back_s,
        policy=AutoscalingPolicy(  # type: ignore[no-untyped-call]
            policy_function=WorkPolicy, policy_kwargs={"targets": asdict(targets)}
        ),
    )
