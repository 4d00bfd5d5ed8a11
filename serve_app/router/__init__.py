"""The ingress of the application: HTTP, server-sent events and the Python handle."""

from serve_app.router.deployment import Router

__all__ = ["Router"]
