"""Docs that can't lag: metrics, links, commands and code blocks."""

import ast
import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from metrics.limits import LimitMetrics
from metrics.requests import RequestMetrics

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_every_metric_is_documented() -> None:
    """Each `lapilli_*` family stands in docs/operations.md."""
    text = (ROOT / "docs" / "operations.md").read_text()
    requests, limits = RequestMetrics("m"), LimitMetrics(CollectorRegistry())
    families = [*requests.registry.collect(), *limits.registry.collect()]
    assert families
    for family in families:
        name = family.name + ("_total" if family.type == "counter" else "")
        assert f"`{name}`" in text, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    """Relative links name files that exist."""
    for link in re.findall(r"\]\(([^)#]+)", page.read_text()):
        assert "://" in link or (page.parent / link).exists(), link


def test_python_in_the_readme_compiles() -> None:
    """Examples are at least Python."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        ast.parse(block)


def test_make_targets_exist() -> None:
    """Each `make X` in the docs is a target."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        named = re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(), re.MULTILINE)
        assert set(named) <= targets, page
