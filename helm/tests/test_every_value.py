"""No value is there for nothing."""

import concurrent.futures
import unittest

import chart
from test_examples import EVERYTHING


# Switches that are refused alone: what is set with them.
WITH = {"etcd.external.tls.enabled": chart.deep("etcd.external.tls.secret", "")}


class EveryValue(unittest.TestCase):
    def test_every_switch_changes_what_is_rendered(self):
        """By itself: from all that is on, from the defaults, or from an example."""
        switches = [(path, value) for path, value in chart.leaves(chart.values()) if isinstance(value, bool)]
        self.assertGreater(len(switches), 30)
        bases = [EVERYTHING, {"engine": "mock"}, *(chart.load(path.read_text()) for path in chart.EXAMPLES)]
        for base in bases:
            before = chart.text(base)

            def changes(switch):
                path, by_default = switch
                given = chart.at(base, path)
                flipped = not (by_default if given is None else given)
                try:
                    return chart.text(chart.merged(base, WITH.get(path, {}), chart.deep(path, flipped))) != before
                except chart.Refused:
                    # That it does not fit the rest is another test's matter.
                    return False

            with concurrent.futures.ThreadPoolExecutor(2) as pool:
                changed = list(pool.map(changes, switches))
            switches = [switch for switch, did in zip(switches, changed, strict=True) if not did]
        self.assertEqual(switches, [], "switches that change nothing")

    def test_every_value_is_read_by_a_template(self):
        templates = "".join(path.read_text() for path in (chart.CHART / "templates").rglob("*") if path.is_file())
        for path, _ in chart.leaves(chart.values()):
            key = path.split(".")[-1]
            # Of these maps, a template reads all keys at once.
            read_whole = (".settings.", "Probe.", "resources.", "updateStrategy.", "dashboard.labels.", "ecurityContext.", "nodeSelector.")
            if not path.startswith(("settings.", "image.")) and not any(word in path for word in read_whole):
                self.assertRegex(templates, rf"[.\"]{key}\b", path)
