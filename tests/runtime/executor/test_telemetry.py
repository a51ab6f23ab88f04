"""What executors and optimizers tell of themselves."""

from __future__ import annotations

import pytest
import torch

from zerograph.runtime.executor.telemetry import LABEL, Telemetry, label


def test_labels_are_read_as_they_are_written() -> None:
    found = LABEL.fullmatch(label(3, "backward", 17))
    assert found is not None and found.groups() == ("3", "backward", "17")


def test_an_update_ends_when_the_device_has_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    telemetry, waited = Telemetry(), list[bool]()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: waited.append(telemetry.recording))
    telemetry.updating()
    telemetry.updated()
    assert waited == []
    telemetry.recording = True
    telemetry.updating()
    telemetry.updated()
    assert waited == [True]
