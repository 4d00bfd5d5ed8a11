"""The pit wall: one page that shows the fleet, and the numbers it asks for each second."""

import base64
import hashlib
import re
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, Response

from serve_app.router.wall import Wall

PAGE = "wall.html"


def wall_routes(wall: Wall) -> APIRouter:
    """Gives `/`, which is for everybody, and `/wall/data`, which asks for a user's key where keys are set."""
    page = files("serve_app.router").joinpath(PAGE).read_bytes()
    headers = {
        "content-security-policy": content_policy(page.decode()),
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
    }
    routes = APIRouter(include_in_schema=False)

    @routes.get("/")
    async def show() -> Response:
        return Response(page, media_type="text/html", headers=headers)

    @routes.get("/wall/data")
    async def data() -> dict[str, Any]:
        return await wall.look()

    return routes


def content_policy(page: str) -> str:
    """Gives the policy under which a browser runs the page's own script and style, and asks its own host alone."""
    script, style = (_hash_of(page, tag) for tag in ("script", "style"))
    return (
        f"default-src 'none'; script-src '{script}'; style-src '{style}'; connect-src 'self'; img-src data:;"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hash_of(page: str, tag: str) -> str:
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
