"""`forerun serve` as a Ray Serve deployment: replicas with one engine each, behind the proxies of a Ray cluster.

Start it with `serve run forerun.deploy.ray:application max_replicas=4`, or with `serve deploy` and a file that has the
arguments; docs/use/scaling.md describes both. Every replica runs the application of forerun.serve.app. Ray brings HTTP
requests to the replicas, counts their queues, and starts and drains replicas.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections import Counter
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forerun.config import EngineConfig
from forerun.deploy.affinity import Keys, order
from forerun.deploy.merging import merged
from forerun.engine.opened import Opened
from forerun.errors import BadOption
from forerun.registry import checked
from forerun.serve.app import make_app
from forerun.serve.metrics import CONTENT_TYPE
from forerun.serve.options import Limits, ServerOptions
from forerun.serve.server import check, loaded, make_services, named, origins_of

NAME = "forerun"  # of the application and of its deployment
# Ray's variables: a function that returns the middleware of every proxy, and the header that groups requests.
CALLBACK_VARIABLE, HEADER_VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", "RAY_SERVE_SESSION_ID_HEADER_KEY"
CALLBACK = "forerun.deploy.ray.proxy_middleware"
HEADER = "x-session-id"  # where HEADER_VARIABLE says nothing
MOST_KNOWN = 65_536  # beginnings whose replica a proxy remembers
BEYOND = 32  # requests beyond a replica's limit that still reach it and get 429; in the proxy they would wait


def _option(default: Any, text: str, **range_: Any) -> Any:
    return dataclasses.field(default=default, metadata={"help": text, **range_})


@dataclass(frozen=True)
class Scale:
    """The number of replicas, and the resources that each replica takes of its node."""

    min_replicas: int = _option(1, "replicas at least", min=1)
    max_replicas: int = _option(1, "replicas at most", min=1)
    target_requests: float | None = _option(
        None, "requests of each replica, running and waiting, that the number of replicas aims at; none = its batch"
    )
    upscale_delay_s: float = _option(30.0, "that the queue must have been long before replicas are added", min=0)
    downscale_delay_s: float = _option(600.0, "that it must have been short before replicas are drained", min=0)
    cpus: float = _option(1.0, "cores of a replica; it computes with as many threads", min=0)
    gpus: float = _option(0.0, "GPUs of a replica", min=0)
    slack: int | None = _option(
        None,
        "requests that the replica which knows a beginning may have more than the least busy one; none = half a batch",
        min=0,
    )

    def __post_init__(self) -> None:
        if self.max_replicas < self.min_replicas:
            raise BadOption(
                f"max_replicas={self.max_replicas} is not possible: it must be at least min_replicas="
                f"{self.min_replicas}"
            )


# ------------------------------------------------------------------------------------------------------------ routing


def proxy_middleware() -> list[Middleware]:
    """Return the middleware that Ray's proxies run before they choose a replica.

    Ray calls this function if CALLBACK_VARIABLE names it.
    """
    return [Middleware(Keys, header=os.environ.get(HEADER_VARIABLE, HEADER).lower())]


class AffineRouter(RequestRouter):
    """Chooses replicas in the order of `affinity.order`. slack: see Scale.

    The load of a replica is the number of open requests that this proxy has sent to the replica. Ray's cache of queue
    lengths is not used, because it learns of changes a round trip late. After a burst of requests, that cache still
    counts requests that were answered long ago, until its entries expire.
    """

    def initialize_state(self, slack: int = 4) -> None:
        """Set up the router. Ray calls this method with the router's arguments from the deployment's config."""
        self._slack, self._sent = slack, Counter[ReplicaID]()
        self._known: dict[str, str] = {}  # key -> the name of its replica, the least recently used first

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Count a request. Ray calls this method when it sends a request, even if the replica then rejects it."""
        super().on_send_request(replica_id)
        self._sent[replica_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Subtract a request from the open requests of a replica. Ray calls this method once for each request."""
        super().on_request_completed(replica_id, internal_request_id)
        self._sent -= Counter((replica_id,))

    async def choose_replicas(
        self, candidate_replicas: Seq[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas in the order in which Ray should try them, as a list of lists with one replica each.

        Ray takes the first replica with room. If no replica has room, Ray asks again later.
        """
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if pending_request is None:
            return [list(candidate_replicas)]
        pending_request.routing_context.should_backoff = True
        key = pending_request.metadata.session_id
        queues = {name: self._sent[replica.replica_id] for name, replica in replicas.items()}
        if not key:
            return [[replicas[name]] for name in order(pending_request.metadata.internal_request_id, queues)]
        known = self._known.pop(key, "")
        names = order(key, queues, known, self._slack)
        if names:
            self._known[key] = known if known in replicas else names[0]
            if len(self._known) > MOST_KNOWN:
                del self._known[next(iter(self._known))]
        return [[replicas[name]] for name in names]


# ----------------------------------------------------------------------------------------------------------- replicas


class Replica:
    """A replica. Ray sets `app` to the replica's web application, whose services are in `app.state.services`."""

    app: FastAPI  # Ray sets it

    async def check_health(self) -> None:
        """Raise the error with which the engine has failed, if it has failed.

        Ray calls this method from time to time, and replaces a replica that raises an error.
        """
        if (failure := self.app.state.services.failure) is not None:
            raise failure

    async def own_metrics(self) -> tuple[str, str]:
        """Return the replica's name, and its metrics in the format of Prometheus."""
        services = self.app.state.services
        text = await services.in_thread(services.metrics.text)
        return serve.get_replica_context().replica_id.unique_id, text.decode()


def make_deployment(config: EngineConfig, options: ServerOptions, scale: Scale) -> Any:
    """Return the Ray Serve application of a model, for `serve.run`. Raises BadOption for options that are not possible.

    options: host and port have no effect, because `serve.start` sets them for the proxies. If api_key is None, a
    replica takes FORERUN_API_KEY from the environment in which it runs.
    """
    check(options)

    def build() -> FastAPI:
        services = make_services([(names, loaded(Opened.of(one))) for names, one in named([config], options)], options)
        key = options.api_key or os.environ.get("FORERUN_API_KEY") or None
        origins = origins_of(
            dataclasses.replace(options, api_key=key, host="0.0.0.0")
        )  # the proxies' host: other machines reach it
        app = make_app(services, api_key=key, origins=origins)
        app.state.services, app.state.watching = services, asyncio.create_task(services.watch_delay())
        app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", "") != "/metrics"]
        app.get("/metrics")(_all_metrics)
        app.add_middleware(_OneId)
        return app

    batch = config.max_batch_size
    autoscaling = AutoscalingConfig(
        min_replicas=scale.min_replicas,
        max_replicas=scale.max_replicas,
        target_ongoing_requests=scale.target_requests or batch,
        upscale_delay_s=scale.upscale_delay_s,
        downscale_delay_s=scale.downscale_delay_s,
    )
    slack = max(1, batch // 2) if scale.slack is None else scale.slack
    deployment = serve.deployment(
        serve.ingress(build)(Replica),
        name=NAME,
        autoscaling_config=autoscaling,
        max_ongoing_requests=batch + options.limits.max_queue + BEYOND,
        graceful_shutdown_timeout_s=options.limits.request_timeout_s,
        request_router_config=RequestRouterConfig(
            request_router_class=AffineRouter, request_router_kwargs={"slack": slack}
        ),
        ray_actor_options={"num_cpus": scale.cpus, "num_gpus": scale.gpus},
    )
    return deployment.bind()


class _OneId:
    """ASGI middleware that removes the header x-request-id from answers, because Ray's proxy writes it, too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [header for header in message.get("headers", []) if header[0] != b"x-request-id"]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, sending)


async def _all_metrics() -> Response:
    """Return a response with the metrics of all replicas. Any replica may get this request."""
    handle = serve.get_deployment_handle(NAME, serve.get_replica_context().app_name)
    texts = await asyncio.to_thread(handle.broadcast("own_metrics").results)
    return Response(merged(dict(texts)), media_type=CONTENT_TYPE)


def application(arguments: Mapping[str, Any]) -> Any:
    """Return the Ray Serve application for the arguments of `serve run`, or for the arguments in a file.

    The arguments are the fields of Scale, ServerOptions, Limits and EngineConfig. served_names, allow_origins and
    allow_hosts may be lists, or texts separated by commas. Raises BadOption for an argument that cannot be honoured.
    """
    left = dict(arguments)
    take = partial(_take, left)
    scale, limits = take(Scale), take(Limits)
    for name in ("host", "port", "log_format", "log_level", "log_texts"):
        if name in left:
            raise BadOption(f"{name} is not an argument of a replica: HTTP and logs are Ray's, set them there")
    lists = {}
    for name in ("served_names", "allow_origins", "allow_hosts"):
        given = left.pop(name, ())
        lists[name] = tuple(given.split(",")) if isinstance(given, str) else tuple(given)
    options = dataclasses.replace(take(ServerOptions), limits=limits, **lists)
    return make_deployment(EngineConfig.make(**left), options, scale)


def _take(left: dict[str, Any], kind: type[Any]) -> Any:
    """Make a dataclass from the entries of `left` that are fields of `kind`, and remove these entries from `left`."""
    given = {f.name: left.pop(f.name) for f in dataclasses.fields(kind) if f.name in left}
    return kind(**checked(kind, given))
