"""Run reports: one self-contained HTML file made from a run directory.

python -c "from pyvision_jax import report; print(report.build('runs/demo'))"
"""

from __future__ import annotations

from pathlib import Path


def build(run_dir: Path | str, out: Path | str | None = None, trajectories: int = 12) -> Path:
    """Writes `run_dir/report.html` (or `out`) and returns its path.

    Works on a run that crashed or still runs: the report says what is missing. `trajectories` is how many are shown
    with pictures, text, code and output. Raises FileNotFoundError only if there is no such directory.
    """
    from pyvision_jax.report.page import write_page  # matplotlib and jinja2: only where a page is made

    return write_page(Path(run_dir), Path(out) if out is not None else None, trajectories)
