"""`python -m tasks.runtime.verification SPEC`: check that a model trains correctly on its data and this machine."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from strata_platform.errors import SpecError
from strata_platform.outcomes import BAD_INPUT, PREEMPTED, UNREACHABLE
from strata_platform.redact import redacted
from strata_platform.spec import RunSpec
from strata_platform.spec.reading.load import load_spec_argument

EXIT_FAILED = 1


def main() -> int:
    """Run the checks.

    Exit codes: 0: all checks that apply pass. 1: a check fails. 2: the spec or its data cannot be used. 68: the Hub
    cannot be reached; try again later.
    """
    parser = argparse.ArgumentParser(prog="python -m tasks.runtime.verification", description=__doc__)
    parser.add_argument("spec", help="a run spec, YAML or JSON; - for standard input")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="set a field of the spec")
    parser.add_argument("--json", action="store_true", help="print JSON; the text for people goes to standard error")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="run only these checks")
    parser.add_argument("--layers", type=int, default=4, help="keep only this number of first layers; 0 keeps all")
    arguments = parser.parse_args()
    try:
        spec = load_spec_argument(arguments.spec, arguments.set)
    except SpecError as error:
        print(error, file=sys.stderr)
        return BAD_INPUT.exit_code
    from tasks.runtime.verification.table import names

    if unknown := [name for name in arguments.only if name not in names()]:
        print(f"error: --only {unknown[0]}: there is no such check; there are {', '.join(names())}", file=sys.stderr)
        return BAD_INPUT.exit_code
    with tempfile.TemporaryDirectory(prefix="strata-verify-") as folder:
        return _until_stopped(spec, Path(folder), arguments)


def _until_stopped(spec: RunSpec, folder: Path, arguments: argparse.Namespace) -> int:
    from tasks.runtime.process.signals import Preempted

    try:
        return _verify(spec, folder, arguments)
    except Preempted as signal_name:
        print(f"stopped by {signal_name}; nothing is kept", file=sys.stderr)
        return PREEMPTED.exit_code


def _verify(spec: RunSpec, folder: Path, arguments: argparse.Namespace) -> int:
    from tasks.runtime.process.errors import Unreachable
    from tasks.runtime.verification.observe import quiet
    from tasks.runtime.verification.report import Report
    from tasks.runtime.verification.subject import make_subject
    from tasks.runtime.verification.table import examine

    began = time.monotonic()
    out = sys.stderr if arguments.json else sys.stdout
    with quiet():
        try:
            subject = make_subject(spec, folder, layers=arguments.layers)
        except (ValueError, Unreachable) as error:
            message = redacted(str(error))
            print(f"error: {message}", file=sys.stderr)
            if arguments.json:
                print(json.dumps({"name": spec.name, "passed": False, "error": message}))
            return UNREACHABLE.exit_code if isinstance(error, Unreachable) else BAD_INPUT.exit_code
        report = Report.of(subject)
        print(report.headline, file=out, flush=True)
        for finding in examine(subject, arguments.only):
            report.findings.append(finding)
            print(finding.line(color=out.isatty()), file=out, flush=True)
    report.seconds = time.monotonic() - began
    print(report.summary, file=out, flush=True)
    if arguments.json:
        print(json.dumps(report.to_dict(), indent=2, ensure_ascii=False))
    return 0 if report.passed else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
