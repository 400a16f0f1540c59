"""The launcher with one fault in rank 1, for tests under torchrun: its name is argument 1.

``nan``: rank 1's loss is NaN in update 3. ``raise``: rank 1 raises in the middle of update 3.
``die``: rank 1 is killed there. ``selection``: rank 1 was given another rank of the adapters.
``version``: rank 1 has another torch. ``seed``: rank 1 has another seed.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace

from glm_lora.cli import main
from glm_lora.cluster import agreement
from glm_lora.train import step

FAULTY = os.environ["RANK"] == "1"
UPDATE = 3


def break_updates(fault: str) -> None:
    real = step.Updater._update

    def update(self: step.Updater, batch, **kwargs):
        if self.optimizer.applied_steps == UPDATE:
            real_loss = step.policy_loss

            def loss(*args, **more):
                sums = real_loss(*args, **more)
                if fault == "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                if fault == "raise":
                    raise ZeroDivisionError("rank 1 has a fault")
                return replace(sums, loss=sums.loss * float("nan"))

            step.policy_loss = loss
        return real(self, batch, **kwargs)

    step.Updater._update = update


def run(fault: str, arguments: list[str]) -> int:
    if FAULTY and fault in ("nan", "raise", "die"):
        break_updates(fault)
    if FAULTY and fault == "selection":
        arguments += ["--lora-rank", "4"]
    if FAULTY and fault == "seed":
        arguments += ["--seed", "7"]
    if FAULTY and fault == "version":
        known = dict(agreement.installed())
        agreement.installed = lambda: known | {"torch": "2.0.0"}
    return main(arguments)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
