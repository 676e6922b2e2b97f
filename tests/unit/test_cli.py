"""The `decodefleet` command: what it loads, what it says when it is used wrongly, and how it names mistakes in a resource."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from decodefleet_operator import cli
from decodefleet_operator.api import DecoderDeployment
from decodefleet_operator.local import manifest

EXAMPLES = Path(__file__).parents[2] / "examples"
HEAVY = ("kopf", "kubernetes", "torch", "transformers", "grpc", "numpy", "aiohttp", "rich")
HEAD = "apiVersion: decodefleet.dev/v1alpha1\nkind: DecoderDeployment\nmetadata: {name: x}\n"
MODEL = "model: {uri: 'file:///m'}"


def run(*arguments: str, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "decodefleet_operator.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "DECODEFLEET_HOME": str(home), **environment},
    )


@pytest.mark.parametrize("arguments", [["--help"], ["up", "--help"], ["scale", "--help"], []])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys, contextlib, io\n"
        "from decodefleet_operator.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        f"    main({arguments!r})\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (result.stdout.strip(), result.stderr) == ("[]", "")


def test_help_lists_every_command_with_what_it_does(tmp_path: Path) -> None:
    result = run("--help", home=tmp_path)
    assert result.returncode == 0
    for command in cli.commands():
        assert command in result.stdout
    assert "not available" not in result.stdout
    assert "Start a fleet on this machine" in result.stdout


def test_no_command_shows_the_help_and_fails(tmp_path: Path) -> None:
    result = run(home=tmp_path)
    assert result.returncode == 2
    assert "commands:" in result.stdout


@pytest.mark.parametrize(("typed", "meant"), [("scal", "scale"), ("descibe", "describe"), ("gt", "get")])
def test_an_unknown_command_names_the_one_that_was_meant(tmp_path: Path, typed: str, meant: str) -> None:
    result = run(typed, home=tmp_path)
    assert result.returncode == 2
    assert f"there is no command {typed!r}; did you mean `decodefleet {meant}`?" in result.stderr


def test_wrong_arguments_say_what_to_write(tmp_path: Path) -> None:
    assert "'-1' is not a number of replicas" in run("scale", "x", "--replicas", "-1", home=tmp_path).stderr
    assert "'70000' is not a port" in run("up", "-f", "x", "--port", "70000", home=tmp_path).stderr
    assert "write it as 500ms" in run("down", "--timeout", "soon", home=tmp_path).stderr


@pytest.mark.parametrize("arguments", [["get", "x"], ["describe", "x"], ["scale", "x", "--replicas", "1"], ["down", "x"]])
def test_a_fleet_that_is_not_there_is_named(tmp_path: Path, arguments: list[str]) -> None:
    result = run(*arguments, home=tmp_path / "home")
    assert result.returncode == 1
    assert "there is no fleet 'x' here" in result.stderr
    assert not (tmp_path / "home").exists(), "looking leaves nothing behind"


def test_a_name_cannot_leave_the_home(tmp_path: Path) -> None:
    assert "cannot be a fleet's name" in run("down", "../x", home=tmp_path).stderr


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_the_examples_are_valid(example: Path) -> None:
    assert manifest.read(str(example)).spec.model.uri.startswith("package://")


OBJECTIVE = "{name: a, metric: TimeToFirstToken"


def spec(rest: str = "", model: str = MODEL) -> str:
    return f"spec: {{{model}{', ' + rest if rest else ''}}}"


MISTAKES = [
    (spec("engine: {batching: {maxBatch: 0}}"), "spec.engine.batching.maxBatch: 0 is below 1"),
    (spec("replicas: 10001"), "spec.replicas: 10001 is above 10000"),
    (spec("engine: {batching: {maxbatch: 3}}"), "spec.engine.batching.maxbatch: there is no such field; did you mean maxBatch?"),
    (spec(model="replicas: 1"), "spec.model: is required: The model that is served"),
    ("", "spec: is required"),
    (spec("engine: {precision: {weights: int3}}"), "spec.engine.precision.weights: \"int3\" is none of 'auto', 'fp32'"),
    (spec("replicas: many"), 'spec.replicas: "many" is not a whole number'),
    (spec(model="model: {uri: smollm}"), 'spec.model.uri: "smollm" does not fit; hf://org/name@revision'),
    (spec("sla: {window: soon}"), "spec.sla.window: 'soon' is not a duration; write it as 500ms"),
    (
        spec("sla: {objectives: [{name: a, metric: Availability, target: 99%}, {name: b, metric: TimeToFirstToken, target: 9%}]}"),
        "spec.sla.objectives[1]: objective b: TimeToFirstToken needs a threshold",
    ),
    (spec("autoscaling: {minReplicas: 4, maxReplicas: 2}"), "spec.autoscaling: minReplicas 4 is more than maxReplicas 2"),
    (spec("engine: []"), "spec.engine: a list is not a mapping of fields"),
    (spec("autoscaling: {maxReplicas: 2, scaleDown: {drainTimeout: 5}}"), "scaleDown.drainTimeout: 5 has no unit; write it as 5s"),
    (spec("engine: {batching: {chunk: 512}}"), 'spec.engine.batching.chunk: 512 is not text; put it in quotes: "512"'),
    (spec("suspend: 'true'"), 'spec.suspend: "true" is not true or false; write it without quotes'),
    (spec(f"sla: {{objectives: [{OBJECTIVE}, target: 95}}]}}"), "objectives[0].target: 95 has no percent sign; write it as 95%"),
    (spec(f"sla: {{objectives: [{OBJECTIVE}, target: 0.95}}]}}"), "objectives[0].target: 0.95 has no percent sign; write it as 95%"),
    (spec(f"sla: {{objectives: [{OBJECTIVE}, target: 9%, threshold: 0s}}]}}"), "objectives[0].threshold: '0s' is no time at all"),
    (spec("sla: {window: 0m}"), "spec.sla.window: '0m' is no time at all; write more than 0s"),
    (spec("resources: {cpu: 0.5}"), "spec.resources.cpu: 0.5 is a fraction; write it in thousandths, as in 500m, or in quotes"),
    (spec("resources: {cpu: 0}"), "spec.resources.cpu: '0' is nothing; write more than 0, or leave the field out"),
    (spec("resources: {memory: 0.0Gi}"), "spec.resources.memory: '0.0Gi' is nothing; write more than 0"),
    (spec("resources: {cpu: true}"), "spec.resources.cpu: true is not text"),
    (spec(f"resources: {{cpu: {'9' * 40}}}"), "is not a quantity; write it as 500m"),
    (spec("engine: {kvCache: {memory: 0}}"), "spec.engine.kvCache.memory: '0' is nothing"),
    (spec("replicas: true"), "spec.replicas: true is not a whole number"),
    (spec("replicas: '2'"), 'spec.replicas: "2" is not a whole number; write it without quotes'),
    (spec("replicas: 2.5"), "spec.replicas: 2.5 is not a whole number"),
    (spec("replicas: 1, replicas: 2"), "replicas is here for the second time (first in line 4); remove one"),
    (spec("cost: {maxPerHour: .inf}"), ".inf is no number; write a finite one, or leave the field out"),
    (spec("cost: {1: 2}"), "a field's name must be text; put it in quotes"),
    (spec("sla: {window: 2026-01-01}"), "spec.sla.window: '2026-01-01' is not a duration"),
    (spec("autoscaling: {maxReplicas: 2, scaleDown: {drainTimeout: 99999d}}"), "'99999d' is too long; these digits are the most"),
    (f"metadata: {{name: Fleet_1}}\n{spec()}", 'metadata.name: "Fleet_1"'),
]


@pytest.mark.parametrize(("text", "expected"), MISTAKES, ids=[expected[:40] for _, expected in MISTAKES])
def test_a_mistake_is_named_by_file_field_and_what_to_change(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text((HEAD.replace("metadata: {name: x}\n", "") if text.startswith("metadata") else HEAD) + text)
    with pytest.raises(manifest.ManifestError) as error:
        manifest.read(str(file))
    assert str(error.value).startswith(f"{file}:")
    assert expected in str(error.value)


def test_every_mistake_is_told_at_once(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(HEAD + spec("replicas: -1, engine: {batching: {maxBatch: 0}}"))
    with pytest.raises(manifest.ManifestError) as error:
        manifest.read(str(file))
    assert len(str(error.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("spec: {a: [}", ":1:12: is not YAML"),
        ("just words", "it must begin with `apiVersion"),
        ("kind: DecoderDeployment", "apiVersion is missing"),
        (HEAD.replace("v1alpha1", "v9"), "apiVersion is 'decodefleet.dev/v9'; write `apiVersion: decodefleet.dev/v1alpha1`"),
        ("kind: Service", "holds no DecoderDeployment"),
        ("", "holds no DecoderDeployment"),
        ("[" * 5000, "is nested too deeply"),
        (f"{HEAD}spec: {'[' * 300 + ']' * 300}", "is nested too deeply"),
        (f"{HEAD}spec: &a [*a]", "is no tree of fields"),
        (f"{HEAD}spec: {'9' * 5000}", "holds a value that cannot be read"),
        (f"{HEAD}{spec()}\n---\n{HEAD}{spec()}", "holds 2 DecoderDeployments"),
    ],
)
def test_a_file_that_is_no_resource_says_so(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(text)
    with pytest.raises(manifest.ManifestError) as error:
        manifest.read(str(file))
    assert expected in str(error.value)


def test_other_kinds_in_the_file_are_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(f"apiVersion: v1\nkind: ConfigMap\n---\n{HEAD}{spec()}\n")
    assert isinstance(manifest.read(str(file)), DecoderDeployment)


@pytest.mark.parametrize("text", ["spec: {replicas: -1}", "]["])
def test_a_malformed_file_starts_nothing(tmp_path: Path, text: str) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(HEAD + text)
    result = run("up", "-f", str(file), "--detach", home=tmp_path / "home")
    assert result.returncode == 1
    assert str(file) in result.stderr
    assert not (tmp_path / "home").exists()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "none.yaml: No such file" in run("up", "-f", "none.yaml", home=tmp_path).stderr


def test_a_folder_of_that_name_that_is_no_fleets_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(HEAD + spec())
    weights = tmp_path / "home" / "x" / "weights.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_text("precious")
    result = run("up", "-f", str(file), "--detach", "--port", "0", home=tmp_path / "home")
    assert (result.returncode, weights.read_text()) == (1, "precious")
    assert f"{weights.parent} holds what is no fleet's, such as weights.safetensors" in result.stderr
    assert [path.name for path in weights.parent.iterdir()] == ["weights.safetensors"]
