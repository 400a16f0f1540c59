"""The scalars of the present rollout, until every sink has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from glm_lora.report.sinks import MetricSink


class Recorder:
    """Collects the scalars of one rollout and hands them to the sinks once."""

    def __init__(self, sinks: Sequence[MetricSink]) -> None:
        self._sinks = list(sinks)
        self._current: dict[str, float] = {}

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add scalars to the present rollout; a time that comes twice is summed."""
        for key, value in metrics.items():
            summed = key.startswith("time/") and key in self._current
            self._current[key] = self._current[key] + value if summed else value

    def flush(self, step: int) -> dict[str, float]:
        """Write the present rollout and begin the next."""
        done, self._current = self._current, {}
        for sink in self._sinks:
            sink.log(step, done)
        return done

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            sink.close()
