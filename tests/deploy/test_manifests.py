"""deploy/: what the manifests start is what the code has."""

from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from forerun.cli.main import app

ROOT = Path(__file__).parents[2]
VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / "deploy" / name).read_text(encoding="utf-8")))


def test_pods_run_a_command_that_is_there() -> None:
    """Options that the server has, probes of routes that it has, more time to end than a request may take."""
    [pod] = [d["spec"]["template"]["spec"] for d in documents("kubernetes.yaml") if d["kind"] == "Deployment"]
    [container] = pod["containers"]
    options = {word for word in container["args"] if word.startswith("--")}
    assert options
    serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    assert options <= {flag for param in serve.params for flag in param.opts}
    for probe, path in (("startupProbe", "/ready"), ("readinessProbe", "/ready"), ("livenessProbe", "/health")):
        assert container[probe]["httpGet"]["path"] == path
    assert pod["terminationGracePeriodSeconds"] > 600
    threads = next(variable["value"] for variable in container["env"] if variable["name"] == "FORERUN_NUM_THREADS")
    assert threads == container["resources"]["limits"]["cpu"]


def test_ray_serves_an_application_that_is_there() -> None:
    """Its arguments are accepted, by Ray's own schema too; every node has the variable that the proxies need."""
    pytest.importorskip("ray", reason="needs Ray: pip install '.[ray]'")
    from ray.serve.schema import ServeDeploySchema

    from forerun.deploy import ray

    [service] = documents("rayservice.yaml")
    config = ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"]))
    [made] = config.applications
    assert made.import_path == f"{ray.__name__}:{ray.application.__name__}"
    assert ray.application(made.args) is not None
    assert (VARIABLE, f"{ray.__name__}.{ray.proxy_middleware.__name__}") == (ray.CALLBACK_VARIABLE, ray.CALLBACK)
    cluster = service["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        [container] = group["template"]["spec"]["containers"]
        assert {"name": VARIABLE, "value": ray.CALLBACK} in container["env"]
    assert f"{VARIABLE}={ray.CALLBACK}" in (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    workers = cluster["workerGroupSpecs"][0]
    assert workers["maxReplicas"] == made.args["max_replicas"]
    assert workers["rayStartParams"]["num-cpus"] == str(made.args["cpus"])
