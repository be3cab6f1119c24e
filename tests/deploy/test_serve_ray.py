"""forerun.deploy.ray on two nodes: the same answers, beginnings that stay together, kills, scaling, draining."""

import re
import secrets
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from forerun import LLM, SamplingParams
from serve.running import wait_for

pytest.importorskip("ray", reason="needs Ray: pip install '.[ray]'")

from benchmarks.serving_servers import free_port
from deploy.cluster import kill_one, two_nodes
from forerun.errors import BadOption

pytestmark = pytest.mark.parity

TWO = {"min_replicas": "2", "max_replicas": "2", "cpus": "0.8", "slack": "2"}


class Cluster:
    """A server on two nodes, with a replica on each. nodes: the head and the other one."""

    def __init__(self, nodes: list[Any], url: str) -> None:
        self.nodes, self.url = nodes, url
        self.http = httpx.Client(base_url=url, timeout=120)
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=5, timeout=120)

    def deploy(self, **arguments: str) -> None:
        from ray import serve

        from forerun.deploy.ray import application

        serve.run(application({**TWO, "api_key": "secret", **arguments}), name="forerun")

    def ask(self, prompt: str, max_tokens: int = 8) -> str:
        made = self.client.completions.create(model="shipped", prompt=prompt, max_tokens=max_tokens, temperature=0)
        return made.choices[0].text

    def served(self) -> Counter[str]:
        """How many requests each replica has answered."""
        found: Counter[str] = Counter()
        lines = re.findall(r"^forerun:request_success_total\{(.*)\} (\S+)$", self.http.get("/metrics").text, re.M)
        for labels, value in lines:
            found[re.findall(r'replica="(\w+)"', labels)[0]] += int(float(value))
        return found


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes, and the shipped pair served on both."""
    import ray
    from ray import serve

    with two_nodes() as nodes:
        ray.init(address=nodes.address, log_to_driver=False, logging_level="WARNING")
        port = free_port()
        serve.start(http_options={"port": port})
        made = Cluster([nodes.head_node, *nodes.worker_nodes], f"http://127.0.0.1:{port}")
        made.deploy()
        yield made
        serve.shutdown()
        ray.shutdown()


def test_answers_are_those_of_one_process(cluster: Cluster) -> None:
    """By the client of OpenAI, whole and streamed; with one request id, and no entry without the key."""
    [expected] = LLM("shipped").generate("def fib(n):\n", SamplingParams(temperature=0, max_tokens=24))
    assert cluster.ask("def fib(n):\n", 24) == expected.text
    stream = cluster.client.completions.create(
        model="shipped", prompt="def fib(n):\n", max_tokens=24, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == expected.text
    answer = cluster.http.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "mine"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (401, "mine")


def test_beginnings_stay_together_until_a_replica_is_busy(cluster: Cluster) -> None:
    """One after the other, equal beginnings meet; many at once are shared; different ones are, too."""
    before = cluster.served()
    for i in range(12):
        cluster.ask("# the same beginning" * 20 + f"def f{i}(x):\n")
    alike = cluster.served() - before
    assert sorted(alike.values()) == [12]
    before = cluster.served()
    with ThreadPoolExecutor(16) as threads:
        list(threads.map(lambda i: cluster.ask("# the same beginning" * 20 + f"def f{i}(x):\n", 32), range(48)))
    at_once = cluster.served() - before
    assert sum(at_once.values()) == 48
    assert min(at_once.values()) >= 8
    assert len(at_once) == 2
    before = cluster.served()
    for i in range(16):
        cluster.ask(f"class C{i}:\n")
    assert len(cluster.served() - before) == 2


def test_a_replica_that_is_killed_under_load_is_replaced(cluster: Cluster) -> None:
    """Clients that try again, as the official ones do, get every answer, and in the end there are two replicas."""
    names = set(cluster.served())
    expected = {i: cluster.ask(f"def g{i}(x):\n", 32) for i in range(4)}
    with ThreadPoolExecutor(8) as threads:
        going = [threads.submit(cluster.ask, f"def g{i % 4}(x):\n", 32) for i in range(200)]
        wait_for(lambda: sum(one.done() for one in going) > 20)
        kill_one("ray::ServeReplica", cluster.nodes[1])
        texts = [one.result() for one in going]
    assert texts == [expected[i % 4] for i in range(200)]

    def are_two() -> bool:
        cluster.ask(f"class D{secrets.randbelow(1000)}:\n")
        now = set(cluster.served())
        return len(now) == 2 and now != names

    assert wait_for(are_two)


def test_the_queue_adds_a_replica_and_draining_finishes_what_was_accepted(cluster: Cluster) -> None:
    """From one replica to two under load; and back to one, while streams run, all of which end as they should."""
    scale = {"min_replicas": "1", "target_requests": "2", "upscale_delay_s": "0", "downscale_delay_s": "0"}
    cluster.deploy(**scale)

    def stream(i: int) -> tuple[int, str | None]:
        made = cluster.client.completions.create(
            model="shipped",
            prompt=f"def h{i}(x):\n",
            max_tokens=1200,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        chunks = [chunk for chunk in made if chunk.choices]
        return len(chunks), chunks[-1].choices[0].finish_reason

    def num_replicas() -> int:
        from ray import serve

        deployment = serve.status().applications["forerun"].deployments["forerun"]
        return deployment.replica_states.get("RUNNING", 0)

    wait_for(lambda: num_replicas() == 1)
    with ThreadPoolExecutor(8) as threads:
        going = [threads.submit(stream, i) for i in range(8)]
        wait_for(lambda: num_replicas() == 2 or all(one.done() for one in going))
        assert num_replicas() == 2
        more = [threads.submit(stream, i) for i in range(8, 16)]
        wait_for(lambda: sum(one.done() for one in going) >= 4)
        cluster.deploy(**scale, max_replicas="1")
        ends = [one.result() for one in (*going, *more)]
    assert all(reason == "length" and num > 10 for num, reason in ends)
    wait_for(lambda: num_replicas() == 1)


def test_arguments() -> None:
    """What cannot be honoured is refused before anything is deployed."""
    from forerun.deploy.ray import application

    for arguments, said in (
        ({"max_replicas": "0"}, "max_replicas=0"),
        ({"min_replicas": "3", "max_replicas": "2"}, "at least min_replicas=3"),
        ({"max_replica": "2"}, "max_replica"),
        ({"port": 80}, "Ray's"),
        ({"max_queue": "many"}, "max_queue='many'"),
        ({"metrics_prefix": "x"}, "forerun or vllm"),
        ({"spec_length": 100}, "spec_length=100"),
    ):
        with pytest.raises(BadOption, match=said):
            application(arguments)
