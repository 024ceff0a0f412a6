"""README and docs are programs: each python block runs and prints what the next text block says.

All blocks of one document share a namespace, as a reader would type them into one session. A block
that is meant to raise is followed by a text block that ends in `ExceptionName: message`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# The pages of docs/api are made of docstrings, whose examples run where they stand.
DOCUMENTS = [
    ROOT / "README.md",
    *sorted(p for p in (ROOT / "docs").rglob("*.md") if p.parent.name != "api"),
]

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.M | re.S)

# Runs in a fresh process: reads blocks as JSON, prints what each printed (and raised) as JSON.
RUNNER = """
import contextlib, io, json, sys
namespace, printed = {"__name__": "__main__"}, []
for file, line, source in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            exec(compile("\\n" * line + source, file, "exec"), namespace)
        except Exception as error:
            out.write(f"{type(error).__name__}: {error}\\n")
            printed.append([out.getvalue(), True])
            continue
    printed.append([out.getvalue(), False])
sys.__stdout__.write("\\n@@" + json.dumps(printed))
"""


@dataclass(frozen=True)
class Block:
    """A fenced block of a document."""

    language: str
    text: str
    line: int


def blocks(path: Path) -> list[Block]:
    """All fenced blocks of a document, in order."""
    text = path.read_text(encoding="utf-8")
    return [
        Block(found[1], found[2], text.count("\n", 0, found.start()) + 1)
        for found in FENCE.finditer(text)
    ]


def run(path: Path, sources: list[Block]) -> list[tuple[str, bool]]:
    """What each python block printed, and whether it raised."""
    name = str(path.relative_to(ROOT))
    feed = json.dumps([(name, block.line, block.text) for block in sources])
    done = subprocess.run(
        [sys.executable, "-c", RUNNER], input=feed, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [tuple(each) for each in json.loads(done.stdout.rpartition("@@")[2])]


@pytest.mark.parametrize(
    "path",
    [path for path in DOCUMENTS if any(b.language == "python" for b in blocks(path))],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_blocks_run_and_print_what_is_shown(path):
    found = blocks(path)
    pythons = [block for block in found if block.language == "python"]
    for block, (printed, raised) in zip(pythons, run(path, pythons), strict=True):
        following = found[found.index(block) + 1 :][:1]
        where = f"{path.name}:{block.line}"
        if following and following[0].language == "text":
            shown = following[0].text.strip()
            assert _same(printed.strip(), shown), f"{where} printed:\n{printed}\nshown:\n{shown}"
        else:
            assert not raised, f"{where} raised {printed}"


def _same(printed: str, shown: str) -> bool:
    """Equal, where a line `...` in the shown text stands for anything."""
    pattern = re.escape(shown).replace(r"\.\.\.", ".*")
    return re.fullmatch(pattern, printed, flags=re.S) is not None


@pytest.mark.mpi
def test_the_first_program_over_ranks(tmp_path: Path):
    """What README says of its program under spmdrun, with two ranks instead of four."""
    said = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert "`spmdrun -n 4` and it trains over sixteen devices, four in each rank" in said
    first, shown = blocks(ROOT / "README.md")[2:4]
    counts = "print(spmd.device_count(), spmd.local_device_count(), w.shape)\n"
    (tmp_path / "first.py").write_text(first.text + counts)
    command = [sys.executable, "-m", "launch", "-n", "2", str(tmp_path / "first.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    for rank in "01":
        lines = [line[5:] for line in done.stdout.splitlines() if line.startswith(f"r{rank} | ")]
        assert lines == [*shown.text.splitlines(), "8 4 (4, 3)"]


def test_first_two_commands_are_one_line_each():
    commands = [b.text.strip() for b in blocks(ROOT / "README.md") if b.language == "sh"][:2]
    assert len(commands) == 2
    for command, end in zip(commands, ("examples/train_digits.py", "loadgroup"), strict=True):
        assert "\n" not in command
        assert command.startswith("python3 -m venv .venv") and command.endswith(end)


@pytest.mark.parametrize("path", [*DOCUMENTS, ROOT / "CONTRIBUTING.md"], ids=lambda p: p.name)
def test_links_lead_somewhere(path):
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text(encoding="utf-8"))
    broken = [link for link in links if not (path.parent / link).exists()]
    assert not broken, f"{path.name} links to {broken}"


def test_a_wrong_output_is_noticed():
    assert _same("a\nb", "a\nb") and _same("line 12: no", "line ...: no")
    assert not _same("a\nc", "a\nb")
