"""Metrics of the machine: processes, memory and GPUs. All are gauges read at a scrape."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import Gauge

from inferencecenter.telemetry.instruments import Counts

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


class MachineMetrics:
    """Metrics of the machine. Those of GPUs have the label ``gpu``, NVML's index; unavailable readings are absent."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._declare_processes(registry)
        self._declare_gpus(registry)

    def _declare_processes(self, registry: CollectorRegistry) -> None:
        self.process_cpu_s = Counts(
            "inferencecenter_process_cpu_seconds",
            "CPU time of a process since it began: front, or engine of a model.",
            ["process", "model"],
            registry=registry,
        )
        self.process_rss_bytes = Gauge(
            "inferencecenter_process_resident_memory_bytes",
            "Memory that a process holds, mapped files included.",
            ["process", "model"],
            registry=registry,
        )
        self.memory_pressure = Gauge(
            "inferencecenter_memory_pressure",
            "1 for how short memory is: easy, shedding parked KV, or full.",
            ["state"],
            registry=registry,
        )
        self.memory_used_bytes = Gauge(
            "inferencecenter_memory_used_bytes",
            "Main memory in use, of what memory_limit_bytes limits.",
            registry=registry,
        )
        self.memory_limit_bytes = Gauge(
            "inferencecenter_memory_limit_bytes",
            "Main memory in use above which parked KV is given up.",
            registry=registry,
        )

    def _declare_gpus(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, documentation: str, *labels: str) -> Gauge:
            return Gauge(f"inferencecenter_gpu_{name}", documentation, ["gpu", *labels], registry=registry)

        self.gpu_info = gauge("info", "1 for each GPU, with what it is.", "name", "uuid", "driver")
        self.gpu_temperature_c = gauge("temperature_celsius", "Temperature of a GPU.")
        self.gpu_power_watts = gauge("power_watts", "Power that a GPU draws.")
        self.gpu_power_limit_watts = gauge("power_limit_watts", "Power that a GPU may draw at most.")
        self.gpu_fan_percent = gauge("fan_percent", "Speed of a GPU's fan.")
        self.gpu_utilization_percent = gauge("utilization_percent", "Share of time in which a GPU was busy.")
        self.gpu_memory_used_bytes = gauge("memory_used_bytes", "Used memory of a GPU, by all programs.")
        self.gpu_memory_total_bytes = gauge("memory_total_bytes", "Memory of a GPU.")
        self.gpu_sm_clock_mhz = gauge("sm_clock_megahertz", "Clock of a GPU's processors.")
        self.gpu_slowdown = gauge("slowdown", "1 for what slows a GPU down now.", "reason")
        self.thermal_state = Gauge(
            "inferencecenter_thermal_state", "1 for how the GPUs are: cool, warm or hot.", ["state"], registry=registry
        )

    def clear_gpus(self) -> None:
        """Drop the readings of GPUs: one that no longer responds has no temperature."""
        for gauge in (
            self.gpu_info,
            self.gpu_temperature_c,
            self.gpu_power_watts,
            self.gpu_power_limit_watts,
            self.gpu_fan_percent,
            self.gpu_utilization_percent,
            self.gpu_memory_used_bytes,
            self.gpu_memory_total_bytes,
            self.gpu_sm_clock_mhz,
            self.gpu_slowdown,
        ):
            gauge.clear()

    def clear_processes(self) -> None:
        """Drop the readings of processes: one that has ended uses nothing."""
        self.process_cpu_s.clear()
        self.process_rss_bytes.clear()
