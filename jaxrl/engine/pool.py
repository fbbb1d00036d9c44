"""Numbered places on the device, counted by how many hold each: pages of keys, rows of state."""


class CountedPool:
    """Places 0 .. count - 1. One that several hold is read by all of them and written by none."""

    def __init__(self, count: int):
        self.count = count
        self._free = list(reversed(range(count)))
        self._holders = [0] * count

    @property
    def free(self) -> int:
        """How many places nobody holds."""
        return len(self._free)

    def take(self) -> int:
        """A free place, now held once. There must be one."""
        place = self._free.pop()
        self._holders[place] = 1
        return place

    def share(self, place: int) -> int:
        """One holder more for a place that is held."""
        assert self._holders[place], f"place {place} is free"
        self._holders[place] += 1
        return place

    def shared(self, place: int) -> bool:
        """Whether more than one holds it."""
        return self._holders[place] > 1

    def release(self, place: int) -> bool:
        """One holder less; True when the place became free."""
        assert self._holders[place], f"place {place} is free already"
        self._holders[place] -= 1
        if self._holders[place]:
            return False
        self._free.append(place)
        return True
