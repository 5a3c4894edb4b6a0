"""What NVIDIA's management library says of the GPUs that an engine may use; nothing where there are none."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

MEMORY_WAIT_S = 30.0
SLACK_BYTES = 256 << 20  # by which memory in use may differ without anything of ours being left


def memory_used() -> dict[str, int]:
    """Bytes in use on each visible GPU, by its uuid; empty without an NVIDIA driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no library, no driver, no permission: then there is nothing to wait for
        return {}
    try:
        return {
            str(pynvml.nvmlDeviceGetUUID(handle)): int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
            for handle in _visible(pynvml)
        }
    finally:
        pynvml.nvmlShutdown()


def first_gpu() -> dict[str, Any] | None:
    """What the first visible GPU is and how it does; None where there is none, and None for what its driver hides.

    name, uuid, driver; total and free (bytes); sm_clock_mhz and memory_clock_mhz (now), power_limit_w, temperature_c.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = _visible(pynvml)[0]
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        name, uuid = str(pynvml.nvmlDeviceGetName(handle)), str(pynvml.nvmlDeviceGetUUID(handle))
    except Exception:  # no library, no driver, no GPU that is visible
        return None

    def told(ask: Callable[[], float], unit: float = 1.0) -> float | None:
        try:
            return ask() / unit
        except pynvml.NVMLError:
            return None

    return {
        "name": name,
        "uuid": uuid,
        "driver": str(pynvml.nvmlSystemGetDriverVersion()),
        "total": int(memory.total),
        "free": int(memory.free),
        "sm_clock_mhz": told(lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)),
        "memory_clock_mhz": told(lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM)),
        "power_limit_w": told(lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(handle), 1000),
        "temperature_c": told(lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),
    }


def visible_indices() -> list[int]:
    """The GPUs that may be used, as nvidia-smi counts them; none without an NVIDIA driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return [int(pynvml.nvmlDeviceGetIndex(handle)) for handle in _visible(pynvml)]
    except Exception:  # no library, no driver, no permission
        return []


def peak_bandwidth() -> float | None:
    """Peak bytes a second of the first visible GPU's memory (two transfers a clock, bus wide); None if unknown."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = _visible(pynvml)[0]
        clock_hz = pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_MEM) * 1e6
        return float(2 * clock_hz * pynvml.nvmlDeviceGetMemoryBusWidth(handle) / 8)
    except Exception:  # no library, no driver, or a driver that does not say
        return None


def energy_j() -> float | None:
    """Joules that the first visible GPU has taken since its driver was loaded; None where that is not told."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(_visible(pynvml)[0])) / 1000
    except Exception:  # no library, no driver, a GPU that does not count
        return None


def wait_for_memory(before: Mapping[str, int], patience_s: float = MEMORY_WAIT_S) -> dict[str, int]:
    """Wait until every GPU is back at what was in use `before`; what is still in use beyond that, by uuid."""
    deadline = time.monotonic() + patience_s
    while True:
        now = memory_used()
        left = {uuid: now[uuid] - used for uuid, used in before.items() if now.get(uuid, 0) > used + SLACK_BYTES}
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(0.2)


def _visible(nvml: Any) -> list[Any]:
    """Handles of the GPUs that CUDA_VISIBLE_DEVICES leaves, by index or uuid; of all where it says nothing."""
    wanted = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    if not wanted:
        return handles
    uuids = [str(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    return [
        handle
        for want in wanted
        for index, (handle, uuid) in enumerate(zip(handles, uuids, strict=True))
        if want == str(index) or (not want.isdecimal() and uuid.startswith(want))
    ]
