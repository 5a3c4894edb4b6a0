"""What is read from NVIDIA's management library, with one that is made up in its place."""

import sys
from types import SimpleNamespace

import pytest

from search.engine import gpu


class NVMLError(Exception):
    pass


class Hidden:
    """A library whose driver does not tell clocks."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    NVMLError = NVMLError

    def nvmlInit(self): ...  # noqa: N802 - the library's own names
    def nvmlDeviceGetCount(self):  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        return index

    def nvmlDeviceGetName(self, handle):  # noqa: N802
        return f"GPU number {handle}"

    def nvmlDeviceGetUUID(self, handle):  # noqa: N802
        return f"GPU-{handle}"

    def nvmlSystemGetDriverVersion(self):  # noqa: N802
        return "580.1"

    def nvmlDeviceGetMemoryInfo(self, handle):  # noqa: N802
        return SimpleNamespace(total=24 << 30, free=23 << 30, used=1 << 30)

    def nvmlDeviceGetClockInfo(self, handle, kind):  # noqa: N802
        raise NVMLError

    def nvmlDeviceGetEnforcedPowerLimit(self, handle):  # noqa: N802
        return 300_000

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):  # noqa: N802
        if handle == 0:
            raise NVMLError
        return 2_500_000

    def nvmlDeviceGetTemperature(self, handle, sensor):  # noqa: N802
        return 41


@pytest.fixture
def library(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", Hidden())


def test_the_first_gpu_is_the_first_that_is_visible(library, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    found = gpu.first_gpu()
    assert (found["name"], found["uuid"], found["driver"]) == ("GPU number 1", "GPU-1", "580.1")
    assert (found["power_limit_w"], found["temperature_c"]) == (300, 41)


def test_what_a_driver_hides_is_none(library, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu.first_gpu()["sm_clock_mhz"] is None and gpu.peak_bandwidth() is None


def test_without_a_driver_there_is_no_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu.first_gpu() is None and gpu.memory_used() == {}


def test_energy_is_in_joules_and_unknown_where_a_gpu_does_not_count(library, monkeypatch):
    assert gpu.energy_j() is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert gpu.energy_j() == 2500.0
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu.energy_j() is None
