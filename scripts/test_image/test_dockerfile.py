"""What is read of a Dockerfile and a .dockerignore, and that all else is refused with its line."""

import pathlib
import tempfile
import unittest

import build
import dockerfile
from ends import Failed


class Bases:
    """Of a Dockerfile that is to be refused, no stage starts."""

    host = None

    def get(self, name, error):
        raise error("started")


class Dockerfile(unittest.TestCase):
    def refused(self, text, line, reason):
        with tempfile.TemporaryDirectory() as folder:
            context = pathlib.Path(folder)
            (context / "Dockerfile").write_text(text)
            (context / ".dockerignore").write_text("")
            step = build.Build(context, context, Bases(), arguments={}, caches=context, binaries=None, say=lambda text: None)
            # As if there were a stage, for what may follow FROM.
            step.do_from = lambda one: step.stages.append(build.Stage(context, {}, []))
            with self.assertRaisesRegex(Failed, rf"^Dockerfile:{line}: .*{reason}"):
                step.run()

    def test_lines_go_on_and_comments_between_them_do_not_count(self):
        found = dockerfile.instructions("# a\n\nRUN a && \\\n  # why\n  b\nUSER 1:1\n")
        self.assertEqual([(one.line, one.word, one.text) for one in found], [(3, "RUN", "a &&   b"), (6, "USER", "1:1")])

    def test_what_is_not_supported_is_refused(self):
        for text, reason in {
            "HEALTHCHECK CMD true": "not supported",
            "ADD a /a": "not supported",
            "COPY --chown=1 a /a": "a flag",
            "COPY *.rs /a": "without patterns",
            "COPY --from=none /a /a": "no stage none",
            "COPY ../a /a": "leads out",
            "COPY a /a": "no a",
            'RUN ["a"]': "form of a shell",
            "RUN <<EOF": "form of a shell",
            "RUN --mount=type=secret,id=a a": "expected --mount",
            "RUN --mount=type=cache,target=/a,sharing=locked a": "expected --mount",
            "RUN --network=none a": "expected --mount",
            "ENV A b": "KEY=VALUE",
            "ENV A=$B": "B is not set",
            "ENV A=${B:-c}": "not supported",
            "ARG A": "nothing gives A",
            "CMD baton help": "form without a shell",
        }.items():
            with self.subTest(text):
                self.refused(f"FROM a\n\n{text}\n", 3, reason)
        self.refused("FROM a\nUSER 1:1\nRUN a\n", 3, "after USER")
        self.refused("RUN a\n", 1, "no FROM")
        self.refused("# escape=`\nFROM a\n", 1, "directive")

    def test_values_of_arg_and_env_are_put_in(self):
        one = dockerfile.Instruction(1, "LABEL", 'a=${A} b="$B c"')
        self.assertEqual(one.pairs({"A": "1", "B": "2"}), {"a": "1", "b": "2 c"})


class Ignored(unittest.TestCase):
    def left(self, text):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for path in ("a/b/target/x", "a/b/y", "a/target/z", "c/d", "e"):
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (root / path).touch()
            return [path for path in dockerfile.Ignored(text).left(root) if (root / path).is_file()]

    def test_the_last_pattern_counts_and_folders_count_for_what_is_in_them(self):
        self.assertEqual(self.left(""), ["e", "a/b/y", "a/b/target/x", "a/target/z", "c/d"])
        self.assertEqual(self.left("*\n!a\n**/target\n"), ["a/b/y"])
        self.assertEqual(self.left("*\n!a/b\n"), ["a/b/y", "a/b/target/x"])
        self.assertEqual(self.left("# why\na\n!a/b/y\n"), ["e", "a/b/y", "c/d"])

    def test_patterns_that_are_not_supported_are_refused(self):
        for pattern in ("a?", "[a]", "!a*"):
            with self.assertRaisesRegex(Failed, r"^\.dockerignore:2: "):
                self.left(f"b\n{pattern}\n")


if __name__ == "__main__":
    unittest.main()
