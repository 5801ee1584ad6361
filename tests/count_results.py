#!/usr/bin/env python3
"""Adds up the JUnit files that ctest wrote into a folder. Prints every failed test and every skipped test or check, then
'N passed, N failed, N skipped'. A file NAME-did-not-build counts as a failure. Exit status 1 when anything failed or
nothing ran."""
import pathlib
import re
import sys
import xml.etree.ElementTree as xml

# A check that a test program leaves out says so on a line of its own: cmocka's mark, or "SKIP: reason".
SKIPPED_CHECK = re.compile(r"^\s*(?:\[\s*SKIPPED\s*\](?!\s*\d+ test)|skip(?:ped)?:)\s*(.*)$", re.M | re.I)
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f]|&#(?:x[0-8bBcC]|x0*1[0-9a-fA-F]|[0-8]|1[124-9]|2[0-9]|3[01]);")


def main(folder):
    passed = failed = 0
    skips, failures = [], []
    for path in sorted(pathlib.Path(folder).glob("*-did-not-build")):
        failed += 1
        failures.append(path.name)
    for path in sorted(pathlib.Path(folder).glob("*.xml")):
        stage = path.stem
        for case in xml.fromstring(CONTROL.sub("?", path.read_text(errors="replace"))).iter("testcase"):
            name = f"{stage}: {case.get('name')}"
            if case.find("skipped") is not None:
                skips.append(f"{name}: the whole test")
            elif case.find("failure") is not None or case.get("status") == "fail":
                failed += 1
                failures.append(name)
            else:
                passed += 1
            output = case.findtext("system-out") or ""
            skips += [f"{name}: {reason.strip()}" for reason in dict.fromkeys(SKIPPED_CHECK.findall(output))]
    for s in skips:
        print(f"SKIPPED  {s}")
    for f in failures:
        print(f"FAILED   {f}")
    print(f"{passed} passed, {failed} failed, {len(skips)} skipped")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
