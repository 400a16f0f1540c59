"""``python -m glm_lora``: the command line."""

import sys

from glm_lora.cli import main

sys.exit(main())
