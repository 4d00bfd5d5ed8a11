"""The same numbers under the names of other systems, so that their dashboards and scalers work unchanged.

vLLM's names are what KEDA examples, the Gateway API's inference extension and many dashboards ask for. An alias carries
`model_name` as vLLM's series do, and `engine` for our `replica`; what routers measure has `router` instead. The fleet
is one page, so to a gateway that expects a page for each pod it is one backend.
"""

import re
from collections.abc import Iterator

from serve_app.metrics import METRICS, MetricSpec

CACHE_CONFIG = "vllm:cache_config_info"
CACHE_CONFIG_HELP = "Size of the KV cache, in labels."
LABEL_NAMES = {"replica": "engine", "finish_reason": "finished_reason"}
SAMPLE = re.compile(r"(?P<name>[\w:]+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
SUFFIXES = ("_bucket", "_sum", "_count")


ALIASED = {
    alias: [spec for spec in METRICS if alias in spec.aliases]
    for alias in dict.fromkeys(alias for spec in METRICS for alias in spec.aliases)
}
"""What each alias repeats. Where that is several metrics, of parts of the fleet, their sum is what the alias counts."""


def with_aliases(exposition: str, *, model: str) -> str:
    """Gives the exposition with every alias of the table after what it repeats."""
    samples = [found for line in exposition.splitlines() if (found := SAMPLE.fullmatch(line))]
    by_name: dict[str, list[re.Match[str]]] = {}
    for sample in samples:
        by_name.setdefault(sample["name"], []).append(sample)
    model_label = f'model_name="{_escaped(model)}"'
    lines = [line for alias, specs in ALIASED.items() for line in _alias_lines(alias, specs, by_name, model_label)]
    lines += _cache_config(by_name, model_label)
    return exposition + "".join(f"{line}\n" for line in lines)


def _alias_lines(
    alias: str, specs: list[MetricSpec], by_name: dict[str, list[re.Match[str]]], model_label: str
) -> Iterator[str]:
    suffixes = SUFFIXES if specs[0].kind == "histogram" else ("",)
    samples = [
        (suffix, sample) for spec in specs for suffix in suffixes for sample in by_name.get(spec.name + suffix, [])
    ]
    if not samples:
        return
    yield f"# HELP {alias} {' '.join(spec.help for spec in specs)}"
    yield f"# TYPE {alias} {specs[0].kind}"
    for suffix, sample in samples:
        labels = ",".join([model_label, *_renamed(sample["labels"] or "")])
        yield f"{alias}{suffix}{{{labels}}} {sample['value']}"


def _cache_config(by_name: dict[str, list[re.Match[str]]], model_label: str) -> Iterator[str]:
    """A gauge of 1 whose labels say what vLLM's does: tokens of a block, and blocks, of each replica."""
    sizes = {sample["labels"]: sample["value"] for sample in by_name.get("pitstop_kv_block_tokens", [])}
    for index, sample in enumerate(by_name.get("pitstop_kv_blocks", [])):
        if index == 0:
            yield f"# HELP {CACHE_CONFIG} {CACHE_CONFIG_HELP}"
            yield f"# TYPE {CACHE_CONFIG} gauge"
        size, blocks = float(sizes.get(sample["labels"], "0")), float(sample["value"])
        config = f'block_size="{size:.0f}",num_gpu_blocks="{blocks:.0f}"'
        yield f"{CACHE_CONFIG}{{{','.join([model_label, config, *_renamed(sample['labels'])])}}} 1.0"


def _renamed(labels: str) -> list[str]:
    return [f'{LABEL_NAMES.get(name, name)}="{value}"' for name, value in LABEL.findall(labels)]


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
