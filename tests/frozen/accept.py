"""Promise today's public surface: ``python tests/frozen/accept.py``."""

from __future__ import annotations

from pathlib import Path

from public_surface import SURFACES

HERE = Path(__file__).parent / "snapshots"


def main() -> None:
    """Write every snapshot; say which ones changed."""
    for name, surface in SURFACES.items():
        path, text = HERE / name, surface()
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")
            print(f"changed: {path}")


if __name__ == "__main__":
    main()
