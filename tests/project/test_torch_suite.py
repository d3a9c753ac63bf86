"""The runner of torch's own test files, on a made-up one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.torch_suite.__main__ import Comparison, Outcome, main
from tests.torch_suite.devices import on_cpu

FILE = """
import unittest
import torch
from torch.utils.checkpoint import checkpoint
from neighbour import twice

class TestMade(unittest.TestCase):
    def gradient(self, function):
        x = torch.ones(3, 3, requires_grad=True)
        checkpoint(function, x, use_reentrant=False).sum().backward()
        return x.grad

    def test_gradient(self):
        self.assertTrue(torch.equal(self.gradient(lambda x: x.sin()), torch.ones(3, 3).cos()))

    def test_python_runs_twice(self):
        calls = []
        self.gradient(lambda x: (calls.append(1), x.sin())[1])
        self.assertEqual(len(calls), twice(1))

    def test_compiled(self):
        x = torch.ones(3, 3, requires_grad=True)
        torch.compile(lambda x: (x @ x).sin().sum(), backend="aot_eager")(x).backward()
        self.assertIsNotNone(x.grad)

    @unittest.skip("not here")
    def test_skipped(self):
        pass

    def test_ends_the_process(self):
        import os
        if os.environ.get("TORCH_TESTS_WAY") != "stock":
            os._exit(3)
"""
NAME = "test/made/test_made.py"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "test" / "made"
    folder.mkdir(parents=True)
    (folder / "test_made.py").write_text(FILE)
    (folder / "neighbour.py").write_text("def twice(x):\n    return 2 * x\n")
    return tmp_path


@pytest.mark.sweep
def test_differences_from_stock_are_listed(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tests that pass in one run only are named with both outcomes, and counted."""
    selection = f"{NAME}:gradient or twice or skipped or ends"
    main([str(checkout), selection, "--ways", "checkpoint"])
    lines = capsys.readouterr().out.splitlines()
    start = f"{selection} checkpoint: "
    names = [line.rpartition(".")[2] for line in lines if line.startswith(start)]
    assert names == ["test_ends_the_process", "test_python_runs_twice"]
    assert any("the process ended" in line for line in lines)
    assert lines[-1].split()[-4:] == ["4", "3", "1", "2"]


@pytest.mark.sweep
def test_every_way_runs(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Backends at no budget and at the floor, and the partitioner, pass the compiled test."""
    main([str(checkout), f"{NAME}:compiled", "--ways", "backend,floor,partitioner"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[-4:] for row in rows] == [["1", "1", "1", "0"]] * 3


def test_difference_is_to_pass_in_one_run_only() -> None:
    """Failures of both runs are none, whatever their reasons."""
    passed, failed, skipped = (Outcome(one, "") for one in ("passed", "failed", "skipped"))
    stock = {"a": passed, "b": passed, "c": failed, "d": skipped, "e": failed}
    ours = {"a": passed, "b": failed, "c": passed, "d": failed}
    found = Comparison("f", "backend", stock, ours)
    assert found.differing == ["b", "c"]
    assert found.row() == ("f", "backend", 5, 2, 2, 2)


def test_cases_of_another_device_run_on_the_cpu() -> None:
    """Device strings and calls are replaced, and what skips without the device goes."""
    source = (
        "@requires_cuda_and_triton\n@unittest.skipIf(not TEST_CUDA, 'no')\n@keep\n"
        "def test(self, devices=('cpu', 'cuda')):\n"
        "    x = torch.ones(2, device='cuda:0').cuda()\n    return 'cudas', x\n"
    )
    expected = (
        "@keep\ndef test(self, devices=('cpu',)):\n"
        "    x = torch.ones(2, device='cpu').cpu()\n    return ('cudas', x)"
    )
    assert on_cpu(source, "cuda") == expected


def test_folder_without_tests_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="give a checkout of torch with its tests") as error:
        main([str(tmp_path)])
    assert "\n" not in str(error.value)


def test_missing_file_is_named(checkout: Path) -> None:
    with pytest.raises(SystemExit, match=r"has no test/test_none\.py"):
        main([str(checkout), NAME, "test/test_none.py"])
