"""Child process of test_links: `charge_links.py FD TIMES NBYTES` charges all links of the table behind FD."""

from __future__ import annotations

import sys

from dualpath.transfer.links import LinkTable

RATES = {"d0/snic.write": 100.0, "d0.0/cnic.read": 50.0, "d0/dram": None}

if __name__ == "__main__":
    fd, times, nbytes = (int(argument) for argument in sys.argv[1:])
    table = LinkTable.attach(fd, RATES)
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(times):
        table.charge(list(RATES), nbytes)
    table.close()
