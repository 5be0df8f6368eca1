"""The report of a verification: its subject and its findings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from strata_platform.redact import redacted
from tasks.runtime.process.ranks import Processes
from tasks.runtime.training.completion import device_name, versions
from tasks.runtime.verification.finding import Finding
from tasks.runtime.verification.subject import Subject


@dataclass
class Report:
    """A report that grows by one finding at a time."""

    name: str
    headline: str
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0

    @classmethod
    def of(cls, subject: Subject) -> Report:
        """The report of a subject, without findings."""
        asked, (here, there) = subject.asked, subject.layers
        layers = f"{here} of {there} layers" if here < there else f"{there} layers"
        dtype = str(subject.computes_in).removeprefix("torch.")
        rows = f"{len(subject.data.train)} rows of {asked.data.sequence_length} tokens"
        device = device_name(Processes())
        headline = f"verify {asked.name}: {redacted(asked.model.name)}, {layers}, {dtype} on {device}; {rows}"
        return cls(asked.name, headline)

    @property
    def failed(self) -> list[Finding]:
        """The findings of failed checks."""
        return [finding for finding in self.findings if finding.status == "fail"]

    @property
    def passed(self) -> bool:
        """Whether all checks that apply pass, and at least one applies."""
        return not self.failed and any(finding.status == "pass" for finding in self.findings)

    @property
    def summary(self) -> str:
        """The last line."""
        counts = {status: sum(f.status == status for f in self.findings) for status in ("pass", "fail", "n/a")}
        summary = ", ".join(f"{number} {status}" for status, number in counts.items())
        return f"{'verified' if self.passed else 'NOT verified'}: {summary}, {self.seconds:.0f} s"

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {
            "name": self.name,
            "passed": self.passed,
            "subject": self.headline,
            "seconds": round(self.seconds, 2),
            "checks": [finding.to_dict() for finding in self.findings],
            "versions": versions(),
        }
