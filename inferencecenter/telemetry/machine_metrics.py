"""Metrics of the machine: processes, memory and GPUs. All are gauges read at a scrape."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import Gauge

    from inferencecenter.telemetry.instruments import MetricRegistry


class MachineMetrics:
    """Metrics of the machine. Those of GPUs have the label ``gpu``, NVML's index; unavailable readings are absent."""

    def __init__(self, registry: MetricRegistry) -> None:
        self._declare_processes(registry)
        self._declare_gpus(registry)

    def _declare_processes(self, registry: MetricRegistry) -> None:
        self.process_cpu_s = registry.counter(
            "process_cpu_seconds",
            "CPU time of a process since its start: front, or the engine of a model.",
            "process",
            "model",
        )
        self.process_rss_bytes = registry.gauge(
            "process_resident_memory_bytes", "Resident memory of a process, including mapped files.", "process", "model"
        )
        self.memory_pressure = registry.gauge(
            "memory_pressure",
            "1 for the current memory pressure: easy, shedding (parked KV is evicted) or full.",
            "state",
        )
        self.memory_used_bytes = registry.gauge(
            "memory_used_bytes", "Main memory in use, measured as memory_limit_bytes is."
        )
        self.memory_limit_bytes = registry.gauge(
            "memory_limit_bytes", "Main memory in use above which parked KV is evicted."
        )

    def _declare_gpus(self, registry: MetricRegistry) -> None:
        self._gpu_gauges: list[Gauge] = []

        def gauge(name: str, documentation: str, *labels: str) -> Gauge:
            made = registry.gauge(f"gpu_{name}", documentation, "gpu", *labels)
            self._gpu_gauges.append(made)
            return made

        self.gpu_info = gauge("info", "Always 1 for each GPU; the labels describe it.", "name", "uuid", "driver")
        self.gpu_temperature_c = gauge("temperature_celsius", "Temperature of a GPU.")
        self.gpu_power_watts = gauge("power_watts", "Power draw of a GPU.")
        self.gpu_power_limit_watts = gauge("power_limit_watts", "Power limit of a GPU.")
        self.gpu_fan_percent = gauge("fan_percent", "Fan speed of a GPU.")
        self.gpu_utilization_percent = gauge("utilization_percent", "Share of time in which a GPU was busy.")
        self.gpu_memory_used_bytes = gauge("memory_used_bytes", "Used memory of a GPU, by all processes.")
        self.gpu_memory_total_bytes = gauge("memory_total_bytes", "Total memory of a GPU.")
        self.gpu_sm_clock_mhz = gauge("sm_clock_megahertz", "SM clock of a GPU.")
        self.gpu_slowdown = gauge("slowdown", "1 for each reason for which a GPU is throttled now.", "reason")
        self.thermal_state = registry.gauge(
            "thermal_state", "1 for the current thermal state of the GPUs: cool, warm or hot.", "state"
        )

    def clear_gpus(self) -> None:
        """Drop the readings of GPUs: one that no longer responds has no temperature."""
        for gauge in self._gpu_gauges:
            gauge.clear()

    def clear_processes(self) -> None:
        """Drop the readings of processes: one that has ended uses nothing."""
        self.process_cpu_s.clear()
        self.process_rss_bytes.clear()
