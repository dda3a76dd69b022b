"""Writes what is documented from the tree: `python -m server.config_docs`, run in a checkout.

It replaces `configs/lapilli.yaml` and the table in `docs/configuration.md`.
"""

from pathlib import Path

from server.config import leaves, sections

YAML_PATH = Path("configs/lapilli.yaml")
DOCUMENT_PATH = Path("docs/configuration.md")
TABLE_START = "<!-- settings: written by python -m server.config_docs -->"
TABLE_END = "<!-- settings end -->"


def yaml_file() -> str:
    """Every setting, commented out, with its default and meaning."""
    lines = [
        "# Lapilli's settings. Lines commented out show the defaults; take away the # to change one.",
        "# Stronger than this file: the environment (LAPILLI_GATEWAY__PORT=9000) and flags (--port 9000).",
        "# `lapilli config` prints the result. See docs/configuration.md.",
    ]
    for section, model in sections().items():
        lines += ["", f"# {model.__doc__}", f"{section}:"]
        for leaf in leaves():
            if leaf.path.startswith(f"{section}."):
                name = leaf.path.removeprefix(f"{section}.")
                lines += [f"  # {leaf.description}", f"  # {name}: {leaf.default_text}"]
    return "\n".join(lines) + "\n"


def markdown_table() -> str:
    """One row per setting: key, default, meaning with unit, environment name, flags."""
    lines = [
        "| setting | default | meaning and unit | environment | flags |",
        "| --- | --- | --- | --- | --- |",
    ]
    for leaf in leaves():
        flags = " ".join(f"`{flag}`" for flag in leaf.flags)
        cells = (f"`{leaf.path}`", f"`{leaf.default_text}`", leaf.description, f"`{leaf.env_name}`", flags)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def with_table(document: str) -> str:
    """`document` with its table replaced. Raises ValueError where the marks are missing."""
    before, rest = document.split(TABLE_START)
    _, after = rest.split(TABLE_END)
    return f"{before}{TABLE_START}\n{markdown_table()}\n{TABLE_END}{after}"


if __name__ == "__main__":
    YAML_PATH.write_text(yaml_file(), encoding="utf-8")
    DOCUMENT_PATH.write_text(with_table(DOCUMENT_PATH.read_text(encoding="utf-8")), encoding="utf-8")
