"""Write the run's report again, to a place of one's own."""

import sys
from pathlib import Path

import glm_lora

root = Path(sys.argv[1] if len(sys.argv) > 1 else "example")

print(glm_lora.write_report(root / "run", root / "report.html"))
