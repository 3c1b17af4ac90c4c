"""What a step costs: hand-computed bytes and milliseconds, and lists of parameters."""

from __future__ import annotations

import json

import pytest

from kvdist.errors import ConfigError
from kvdist_launch.cost import Layout, Scheme, Tensor, apart, cost, kept_by, verdict
from kvdist_launch.estimate import main
from kvdist_launch.parameters import of_file, of_number, of_shapes

MIB = 1 << 20
TWO_HOSTS = Layout((0, 1), (0, 1), ("d1", "d2"))


@pytest.mark.parametrize(
    ("scheme", "ms"),
    [
        (Scheme.WHOLE, 838.9),
        (Scheme.FP16, 629.1),
        (Scheme.FP16_BOTH, 419.4),
        (Scheme.TWO_BIT, 445.6),
        (Scheme.TWO_BIT_PULL_FP16, 235.9),
    ],
)
def test_two_hosts_with_a_worker_and_a_server_each(scheme, ms):
    # 25 keys of 4 MiB: half of each crosses in each direction. 13.1 million elements pushed by one worker and as many
    # answered by the server beside it leave a host: whole 52.4 + 52.4 MB, of 2-bit 3.3 MB, at 125 MB/s.
    found = cost([Tensor(MIB, 4)] * 25, TWO_HOSTS, scheme, mb_per_s=125.0)
    assert round(found.ms, 1) == ms


def test_every_process_apart_makes_the_servers_line_the_busiest():
    # 3 workers, 2 servers, 2000 elements: small keys go whole to the server that has less, 1200 to one and 800 to the
    # other. The first gets 3 times 4800 bytes.
    found = cost([Tensor(800, 4), Tensor(1200, 4)], apart(3, 2), Scheme.WHOLE, mb_per_s=0.1, latency_ms=0.5)
    assert (found.push_bytes, found.pull_bytes) == (8000, 8000)
    assert (found.server_in_bytes, found.server_out_bytes) == (14400, 14400)
    assert (found.line_bytes, found.line) == (14400, "into server 0")
    assert found.ms == pytest.approx(144.5)


def test_one_worker_makes_its_own_line_the_busiest():
    found = cost([Tensor(2_000_000, 4)], apart(1, 4), Scheme.TWO_BIT, mb_per_s=100.0)
    assert (found.push_bytes, found.pull_bytes) == (500_000, 8_000_000)
    assert (found.server_in_bytes, found.server_out_bytes) == (125_000, 2_000_000)
    assert (found.line_bytes, found.line, found.ms) == (8_000_000, "into worker 0", 80.0)


def test_workers_of_one_host_push_once_to_servers_elsewhere_but_what_is_encoded_each_for_itself():
    layout = Layout((0, 0, 0), (1,), ("many", "one"))
    assert cost([Tensor(1000, 4)], layout, Scheme.WHOLE, 1.0).line_bytes == 4000
    assert cost([Tensor(1000, 4)], layout, Scheme.FP16, 1.0).line_bytes == 12000
    assert cost([Tensor(1000, 2)], layout, Scheme.WHOLE, 1.0).line_bytes == 6000


def test_nothing_leaves_a_single_host():
    found = cost([Tensor(1000, 4)], Layout((0, 0), (0, 0), ("d1",)), Scheme.WHOLE, 1.0, latency_ms=3.0)
    assert (found.line_bytes, found.line, found.ms) == (0, "nothing leaves a host", 0.0)
    assert found.server_in_bytes == 8000


def test_large_parameters_are_cut_over_all_servers_and_small_ones_balance_them():
    kept = kept_by([Tensor(10, 4), Tensor(1_000_001, 4), Tensor(30, 4), Tensor(20, 4)], 3)
    assert [sum(one.elements for one in mine) for mine in kept] == [333_333 + 30, 333_334 + 20, 333_334 + 10]


@pytest.mark.parametrize(("scheme", "pushed", "pulled"), [
    (Scheme.WHOLE, 28, 28), (Scheme.FP16, 14, 28), (Scheme.TWO_BIT, 2, 28), (Scheme.TWO_BIT_PULL_FP16, 2, 14),
])  # fmt: skip
def test_seven_elements_of_float32(scheme, pushed, pulled):
    assert (scheme.push_bytes(7, 4), scheme.pull_bytes(7, 4)) == (pushed, pulled)


def test_the_verdict_names_the_line_and_what_helps():
    tensors = [Tensor(MIB, 4)] * 25
    costs = [(scheme, cost(tensors, TWO_HOSTS, scheme, 125.0)) for scheme in Scheme]
    assert verdict(costs, 300) == (
        "The network takes 839 ms of a step and computing 300 ms: the network costs more, by what goes into d2."
        " Compression '2bit, pull fp16' brings it down to 236 ms."
    ).replace("into d2", costs[0][1].line)
    assert verdict(costs, 100).endswith("The least is 236 ms, with compression '2bit, pull fp16'.")
    assert "what overlaps with the backward pass costs little" in verdict(costs, 1000)


@pytest.mark.parametrize(
    ("text", "elements"), [("3x4,5", [12, 5]), ("7", [7]), ("scalar,2x3x4", [1, 24]), ("0x5", [0])]
)
def test_shapes_are_read(text, elements):
    assert of_shapes(text, "float64") == [Tensor(count, 8) for count in elements]


@pytest.mark.parametrize("text", ["", "3x", "3*4", "-1", "a"])
def test_what_is_no_shape_is_refused(text):
    with pytest.raises(ConfigError, match="write sizes with x between"):
        of_shapes(text, "float32")


@pytest.mark.parametrize("count", [0, -5, float("nan"), float("inf")])
def test_a_number_of_elements_must_be_one(count):
    with pytest.raises(ConfigError, match="it counts elements"):
        of_number(count, "float32")


def write(path, header: bytes):
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    return path


def test_a_safetensors_file_gives_its_floating_point_arrays(tmp_path):
    header = {
        "__metadata__": {"format": "pt"},
        "weight": {"dtype": "BF16", "shape": [3, 5], "data_offsets": [0, 30]},
        "scale": {"dtype": "F32", "shape": [], "data_offsets": [30, 34]},
        "steps": {"dtype": "I64", "shape": [1], "data_offsets": [34, 42]},
    }
    assert of_file(write(tmp_path / "model", json.dumps(header).encode())) == [Tensor(15, 2), Tensor(1, 4)]


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"no JSON", "its header is no JSON"),
        (b"[1, 2]", "it has no header"),
        (b"{}", "has no floating-point arrays"),
        (b'{"w": 3}', "'w' has no shape"),
        (b'{"w": {"dtype": "F32", "shape": [-1]}}', "'w' has no shape"),
    ],
)
def test_a_file_that_is_no_list_of_parameters_is_refused(tmp_path, header, message):
    with pytest.raises(ConfigError, match=message):
        of_file(write(tmp_path / "model", header))


def test_an_estimate_is_shown_for_every_compression(capsys):
    words = ["--shapes", "1024x1024", "-n", "2", "--bandwidth", "125", "--compute-ms", "500"]
    assert main(words) == 0
    first, second, *_, last = capsys.readouterr().out.splitlines()
    assert first == "1 parameter, 1,048,576 elements, 4.2 MB"
    assert second == "2 workers and 2 servers on 4 machines; lines of 125 MB/s, 0.00 ms there and back"
    assert last.startswith("The network takes 34 ms of a step and computing 500 ms")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-n", "2", "--bandwidth", "1"], "name the parameters in one way"),
        (["-n", "2", "--params", "5", "--shapes", "5", "--bandwidth", "1"], "name the parameters in one way"),
        (["-n", "2", "--params", "5"], "say how fast the network is in one way"),
        (["-n", "2", "--params", "5", "--bandwidth", "0"], "--bandwidth is 0"),
        (["-n", "0", "--params", "5", "--bandwidth", "1"], "-n is 0; a job needs at least 1"),
        (["-n", "2", "-s", "0", "--params", "5", "--bandwidth", "1"], "-s is 0; a job needs at least 1"),
        (["-n", "2", "--bandwidth", "1", "/nonexistent"], "/nonexistent cannot be read: No such file"),
    ],
)
def test_a_wrong_question_is_answered_with_what_to_write(capsys, words, message):
    assert main(words) == 2
    assert message in capsys.readouterr().err
