#!/usr/bin/env python3
"""Writes the hwloc topologies (XML, version 2) of this folder: machines that we do not own, for test_topo.
Run it here after a change and commit the result; the files hold only what the tests need, and no comments: hwloc's own
parser, used where its libxml plugin is missing, knows none."""
import pathlib

HERE = pathlib.Path(__file__).parent


def mask(cpus):
    bits = sum(1 << c for c in cpus)
    return "0x%08x" % bits if bits < 1 << 32 else "0x%08x,0x%08x" % (bits >> 32, bits & 0xFFFFFFFF)


class Xml:
    def __init__(self):
        self.lines, self.gp = [], 0

    def open(self, kind, cpus, nodes, index=None, extra="", close=False):
        self.gp += 1
        sets = f'cpuset="{mask(cpus)}" complete_cpuset="{mask(cpus)}" nodeset="{mask(nodes)}" complete_nodeset="{mask(nodes)}"'
        if kind == "Machine":
            sets += f' allowed_cpuset="{mask(cpus)}" allowed_nodeset="{mask(nodes)}"'
        where = "" if index is None else f' os_index="{index}"'
        self.lines.append(f'<object type="{kind}"{where} {sets} gp_index="{self.gp}"{extra}{"/" if close else ""}>')

    def close(self):
        self.lines.append("</object>")

    def node(self, index, cpus, gib):
        self.open("NUMANode", cpus, [index], index, f' local_memory="{gib << 30}"', close=True)

    def core(self, index, cpus, nodes, l2):
        cache = f' cache_size="{l2}" depth="2" cache_linesize="64" cache_associativity="16" cache_type="0"'
        self.open("L2Cache", cpus, nodes, index, cache)
        self.open("Core", cpus, nodes, index)
        for c in cpus:
            self.open("PU", [c], nodes, c, close=True)
        self.close()
        self.close()

    def l3(self, index, cpus, nodes, size):
        self.open("L3Cache", cpus, nodes, index,
                  f' cache_size="{size}" depth="3" cache_linesize="64" cache_associativity="16" cache_type="0"')

    def save(self, name, kinds=()):
        head = ['<?xml version="1.0" encoding="UTF-8"?>', '<!DOCTYPE topology SYSTEM "hwloc2.dtd">',
                '<topology version="2.0">']
        tail = [f'<cpukind cpuset="{mask(c)}" forced_efficiency="{e}"><info name="CoreType" value="{t}"/></cpukind>'
                for c, e, t in kinds] + ["</topology>", ""]
        (HERE / name).write_text("\n".join(head + self.lines + tail))


def hybrid():
    """8 fast and 12 slow cores without SMT. The slow ones come first, so that order alone cannot give the answer."""
    x, cpus, slow = Xml(), list(range(20)), list(range(12))
    x.open("Machine", cpus, [0], 0)
    x.open("Package", cpus, [0], 0)
    x.node(0, cpus, 64)
    x.l3(0, cpus, [0], 36 << 20)
    for c in cpus:
        x.core(c, [c], [0], (512 << 10) if c in slow else (3 << 20))
    for _ in range(3):
        x.close()
    x.save("hybrid-8p-12e.xml",
           [(slow, 0, "IntelAtom"), ([c for c in cpus if c not in slow], 1, "IntelCore")])


def two_sockets():
    """2 x 4 cores with 2 hardware threads, numbered as Linux does: siblings are c and c + 8."""
    x = Xml()
    x.open("Machine", range(16), [0, 1], 0)
    for p in range(2):
        cpus = [c + 8 * t for c in range(4 * p, 4 * p + 4) for t in range(2)]
        x.open("Package", cpus, [p], p)
        x.node(p, cpus, 48)
        x.l3(p, cpus, [p], 16 << 20)
        for c in range(4 * p, 4 * p + 4):
            x.core(c, [c, c + 8], [p], 1 << 20)
        x.close()
        x.close()
    x.close()
    x.save("two-sockets-smt.xml")


def odd_nodes():
    """Node 1 has memory and no CPU; cores 2 and 3 belong to no node."""
    x = Xml()
    x.open("Machine", range(4), [0, 1], 0)
    x.open("Group", [], [1], None, ' kind="1001" subkind="0"')
    x.node(1, [], 128)
    x.close()
    x.open("Package", [0, 1], [0], 0)
    x.node(0, [0, 1], 32)
    for c in (0, 1):
        x.core(c, [c], [0], 1 << 20)
    x.close()
    x.open("Package", [2, 3], [], 1)
    for c in (2, 3):
        x.core(c, [c], [], 1 << 20)
    x.close()
    x.close()
    x.save("odd-nodes.xml")


def conflicting():
    """Packages that both claim CPU 1, as broken virtual machines report them."""
    x = Xml()
    x.open("Machine", range(3), [0], 0)
    x.node(0, range(3), 8)
    for p, cpus in enumerate(([0, 1], [1, 2])):
        x.open("Package", cpus, [0], p)
        for c in cpus:
            x.core(c, [c], [0], 1 << 20)
        x.close()
    x.close()
    x.save("conflicting.xml")


if __name__ == "__main__":
    hybrid()
    two_sockets()
    odd_nodes()
    conflicting()
    (HERE / "garbage.xml").write_text('<?xml version="1.0"?>\n<topology version="2.0"><object type="Machine" cpuset="0xzz')
    (HERE / "empty.xml").write_text("")
