"""The docs agree with the code."""

from __future__ import annotations

import inspect
import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pages
import torchweld
from processes import starts
from torchweld.bench.measure import evidence
from torchweld.commands import doctor

ROOT = Path(__file__).parents[2]


def test_the_tables_are_current() -> None:
    """python docs/generate.py writes them."""
    generate = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    assert (ROOT / "docs" / "ops.md").read_text() == generate["table"]()
    for name in ("gpu", "optimizers", "modules", "performance"):
        assert (ROOT / "docs" / f"{name}.md").read_text() == generate[name]()
    assert (ROOT / "README.md").read_text() == generate["readme"]()


def test_stale_and_missing_figures_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The README shows no stale row of a GPU, and says where evidence is missing."""
    generate = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    monkeypatch.setattr(evidence, "read_records", dict)
    assert generate["NO_GPU"] in generate["measured"]()
    monkeypatch.undo()
    shown = generate["measured"]()
    monkeypatch.setattr(evidence, "list_results", lambda *_: [])
    assert shown.count("x |") > generate["measured"]().count("x |")
    assert "(stale)" not in shown


def _with(need: str) -> list[str]:
    """The pages with blocks that need this."""
    return [page for page in pages.with_python() if need in {n for n, _ in pages.blocks(page)}]


@pytest.mark.parametrize("page", _with(""))
def test_a_pages_python_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block, pasted in order into a fresh interpreter.

    tests/peers/peer_docs.py runs the pages with blocks that need other packages, and
    test_a_pages_processes_run those that need several processes.
    """
    monkeypatch.chdir(tmp_path)
    assert pages.run(page)


def test_blocks_for_processes_say_so() -> None:
    """Six of 52 blocks failed when pasted: only a comment that no reader sees told of torchrun."""
    for page in _with("processes"):
        for need, text in pages.blocks(page):
            assert text.startswith("# torchrun --nproc-per-node 2") == (need == "processes"), page


PAGES = _with("processes")


@pytest.mark.parametrize("page", PAGES)
def test_a_pages_processes_run(page: str, tmp_path: Path) -> None:
    """In two processes: every block of the page, in order.

    torchrun starts the first page's blocks. Other pages' blocks have the same variables, and fork
    from a process that has imported torch.
    """
    (_by_torchrun if page == PAGES[0] else _forked)(page, tmp_path)


def _by_torchrun(page: str, folder: Path) -> None:
    script = folder / "page.py"
    count = len(pages.blocks(page))
    script.write_text(f"import pages\n\nassert pages.run({page!r}, 'processes') == {count}\n")
    places = [str(Path(pages.__file__).parent), str(ROOT / "python"), os.environ.get("PYTHONPATH")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, places)),
        "OMP_NUM_THREADS": "1",
        "MPLBACKEND": "Agg",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ran = subprocess.run(
        [*command, "--nproc-per-node", "2", str(script)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]


def _forked(page: str, folder: Path) -> None:
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    started = [
        starts().Process(target=_be_rank, args=(rank, port, page, folder)) for rank in range(2)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(timeout=240)
    if any(process.exitcode != 0 for process in started):
        for process in started:
            process.kill()
        pytest.fail("\n".join(told.read_text()[-4000:] for told in folder.glob("*.told")))


def _be_rank(rank: int, port: int, page: str, folder: Path) -> None:
    os.environ |= {
        **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MPLBACKEND": "Agg"},
        **{"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)},
    }
    os.chdir(folder)
    torch.set_num_threads(1)
    with Path(f"{rank}.told").open("w") as told:
        os.dup2(told.fileno(), 1)
        os.dup2(told.fileno(), 2)
    assert pages.run(page, "processes") == len(pages.blocks(page))


def test_every_page_with_python_is_known() -> None:
    """What a block may need is run somewhere."""
    needs = {need for page in pages.with_python() for need, _ in pages.blocks(page)}
    peers = {"transformers", "accelerate", "peft", "kernels", "lightning", "trl"}
    assert needs <= {"", "processes", *peers}


def test_the_doctors_words_are_its_words() -> None:
    """Quotes in docs/troubleshooting.md occur in a source file; dots stand for variable parts."""
    files = [*(ROOT / "python" / "torchweld").rglob("*.py")]
    joined = " ".join(re.sub(r'"\s*\n\s*f?"', "", file.read_text()) for file in files)
    joined = re.sub(r"\{[^{}]*\}", "", joined).replace("`", "")
    page = (ROOT / "docs" / "troubleshooting.md").read_text().partition("## When it is slower")[0]
    rows = re.findall(r"^\| (`.*?) \| ", page, re.MULTILINE)
    quotes = [quote for row in rows for quote in re.findall(r"`([^`]+)`", row)]
    assert len(quotes) > 15
    for quote in quotes:
        assert quote.replace(" cuda ", "  ") in joined or quote in joined, quote


def _anchors(page: Path) -> set[str]:
    """The anchors that GitHub and the docs site give to the page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


def test_links_lead_to_files_and_headings() -> None:
    """`make docs` checks them too, if its generator is installed."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    found = [(page, re.findall(r"\]\((.*?)\)", page.read_text())) for page in pages]
    inner = [(page, link) for page, links in found for link in links if "://" not in link]
    assert len(inner) > 20
    for page, link in inner:
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.relative_to(ROOT)}: {path}"
        assert not anchor or anchor in _anchors(target), f"{page.relative_to(ROOT)}: #{anchor}"


def test_public_functions_are_documented() -> None:
    for name in torchweld.functional.__all__:
        function = getattr(torchweld.functional, name)
        assert "Args:" in function.__doc__
        assert "Returns:" in function.__doc__
        named = {*inspect.signature(function).parameters, "return"}
        assert set(function.__annotations__) == named


def _is_defined(file: Path, name: str) -> bool:
    """Whether a source defines a name, and what is named after its dots."""
    kinds = r"(def|class|struct|Tensor>?|void|Dropout|TW_EXPORT void)"
    source = file.read_text()
    return all(re.search(rf"{kinds} {part}\b", source) for part in name.split("."))


def test_the_homes_of_questions_are_there() -> None:
    """Every home names a file, and a definition in it."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text.partition("## Each question has one home")[2].partition("\n## ")[0]
    tops = ("bench", "csrc", "tests", "triton_kernels")
    homes = re.findall(r"`([\w/]+\.(?:py|h))`(?:: `(\w+)`)?", table)
    assert len(homes) > 14
    for path, name in homes:
        file = ROOT / ("" if path.split("/")[0] in tops else "python/torchweld") / path
        assert file.exists(), path
        assert not name or _is_defined(file, name), (path, name)


def test_the_walks_lead_through_what_is_there() -> None:
    """Every stop names a file and definitions in it."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    walks = text.partition("## Five walks")[2].partition("## Adding an op")[0].split("### ")[1:]
    assert len(walks) == 5
    for walk in walks:
        stops = re.findall(r"^\d+\. `([^`]+)`: `([\w.]+)`", walk, re.MULTILINE)
        assert len(stops) == len(re.findall(r"^\d+\. ", walk, re.MULTILINE)) <= 10
        for file, name in stops:
            assert _is_defined(ROOT / file, name), (file, name)


def test_every_environment_variable_is_documented() -> None:
    """What the package reads, what the doctor prints, and the table of docs/stability.md agree."""
    native = {".h", ".cpp", ".cu", ".cuh"}
    sources = [*(ROOT / "python").rglob("*.py")]
    sources += [file for file in (ROOT / "csrc").rglob("*") if file.suffix in native]
    read = {
        name for file in sources for name in re.findall(r'"(TORCHWELD_[A-Z_]+)"', file.read_text())
    }
    built = {"TORCHWELD_CUDA"}  # by the build only
    page = (ROOT / "docs" / "stability.md").read_text()
    documented = set(re.findall(r"^\| `(TORCHWELD_[A-Z_]+)` \|", page, re.MULTILINE))
    assert read - built == documented == set(doctor.VARIABLES)


def test_the_docs_of_each_release_are_kept(tmp_path: Path) -> None:
    """The newest number is first, not the last name. A release built again replaces its own."""
    add_version = runpy.run_path(str(ROOT / "docs" / "versions.py"))["add_version"]
    built, site = tmp_path / "built", tmp_path / "site"
    built.mkdir()
    site.mkdir()
    for version in ("0.9.0", "0.10.0", "0.2.1", "0.10.0"):
        (built / "index.html").write_text(version)
        add_version(built, site, version)
    assert (site / "0.9.0/index.html").read_text() == "0.9.0"
    listed = re.findall(r'href="([\d.]+)/"', (site / "versions.html").read_text())
    assert listed == ["0.10.0", "0.9.0", "0.2.1"]
    assert "url=0.10.0/" in (site / "index.html").read_text()


def test_the_citation_has_the_package_s_license_and_no_version() -> None:
    """A release sets one number. CITATION.cff had the number, too, which nothing would change."""
    lines = (ROOT / "CITATION.cff").read_text().splitlines()
    given = dict(line.split(": ", 1) for line in lines if re.match(r"[a-z-]+: ", line))
    assert given.keys() >= {"cff-version", "message", "title"}
    assert f'license = "{given["license"]}"' in (ROOT / "pyproject.toml").read_text()
    assert "version" not in given
