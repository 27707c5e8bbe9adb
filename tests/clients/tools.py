"""The two tools that clients without tools of their own are given."""

from pathlib import Path


def list_dir(path: str) -> str:
    "The names of the files of a directory"
    return "\n".join(sorted(entry.name for entry in Path(path).iterdir()))


def write_file(path: str, content: str) -> str:
    "Writes a file"
    Path(path).write_text(content)
    return "written"
