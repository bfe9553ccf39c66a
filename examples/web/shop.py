"""An app of web pages with the dead letters of its tasks inside: see README.md."""

import os

from celery import Celery
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

from celery_dlq import DeadLetters
from celery_dlq.web import User

app = Celery("shop", broker=os.environ.get("SHOP_REDIS", "redis://localhost:6379/0"))
app.conf.dlq_queues = {"orders": {"max_deliveries": 3}}
dlq = DeadLetters(app)

OPERATORS = {"olga"}


async def who(request):
    """Whom a proxy in front of this app has logged in, and what they may do."""
    name = request.headers.get("x-user")
    if name is None:
        return None
    may = {"view", "redrive", "discard"} if name in OPERATORS else {"view"}
    return User(name=name, permissions=may)


def front(request):
    return PlainTextResponse("The shop. Its dead letters are at /ops/dlq/\n")


# FastAPI: api.mount("/ops/dlq", dlq.asgi(access=who, home="/"))
site = Starlette(
    routes=[Route("/", front), Mount("/ops/dlq", dlq.asgi(access=who, title="shop", home="/"))]
)
