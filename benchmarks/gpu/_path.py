"""Makes the modules of all benchmark folders importable. Scripts import it first."""

import sys
from pathlib import Path

for _folder in sorted(Path(__file__).resolve().parents[1].iterdir()):
    if _folder.is_dir() and str(_folder) not in sys.path:
        sys.path.append(str(_folder))
