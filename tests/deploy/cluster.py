"""Two Ray nodes on this machine, as processes of their own, and what runs on them."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from serve.running import SOURCE, wait_for

STORE_BYTES = 80 << 20  # of each node: the least that Ray takes
# What the processes of a node inherit.
ENVIRONMENT = {
    "PYTHONPATH": str(SOURCE),
    "OMP_NUM_THREADS": "1",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "forerun.deploy.ray.proxy_middleware",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


@contextmanager
def two_nodes() -> Iterator[Any]:
    """A cluster of two nodes with one core each; this process is no driver of it yet."""
    from ray.cluster_utils import Cluster

    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ |= ENVIRONMENT
    usual: dict[str, Any] = {"num_cpus": 1, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=usual)
    try:
        cluster.add_node(**usual)
        cluster.wait_for_nodes()
        yield cluster
    finally:
        cluster.shutdown()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def workers(title: str, node: Any) -> list[int]:
    """The processes of a node that Ray calls `title`, such as ray::Engine."""
    raylet = node.all_processes["raylet"][0].process.pid
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command, status = (folder / "cmdline").read_bytes(), (folder / "stat").read_text()
        except OSError:
            continue
        if command.startswith(title.encode()) and int(status.rpartition(")")[2].split()[1]) == raylet:
            found.append(int(folder.name))
    return found


def kill_one(title: str, node: Any) -> int:
    """Kill a worker of a node as soon as there is one, as the kernel does when memory is short."""
    wait_for(lambda: workers(title, node))
    killed = workers(title, node)[0]
    os.kill(killed, signal.SIGKILL)
    return killed
