"""The files in which Linux shows control groups, in a directory."""

V2 = "30 24 0:26 {top} {point} rw,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "35 31 0:32 {top} {point} rw,relatime - cgroup cgroup rw,memory"
OTHER = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755"


class System:
    """The files of a kernel in a directory."""

    def __init__(self, root, mount, cgroup, *, top="/", point="/sys/fs/cgroup"):
        self.root = root
        self.point = root / point.lstrip("/").replace("\\040", " ")
        own = root / "proc/self"
        own.mkdir(parents=True)
        own.joinpath("mountinfo").write_text(f"{OTHER}\n{mount.format(top=top, point=point)}\n")
        own.joinpath("cgroup").write_text(f"{cgroup}\n")

    def limit(self, group, text, name="memory.max"):
        path = self.point / group / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
