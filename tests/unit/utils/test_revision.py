from __future__ import annotations

import subprocess

from sylvan.utils.revision import WRITTEN, commit


def git(folder, *words):
    names = ("-c", "user.name=A", "-c", "user.email=a@b.c")
    command = ["git", "-C", str(folder), *names, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def checkout(tmp_path):
    package = tmp_path / "src" / "sylvan"
    package.mkdir(parents=True)
    (package / "code.py").write_text("one\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    return package


def test_a_package_names_the_commit_it_was_built_from(tmp_path):
    (tmp_path / WRITTEN).write_text("0123456789ab\n")

    assert commit(tmp_path) == "0123456789ab"


def test_a_checkout_names_its_commit_and_changes(tmp_path):
    package = checkout(tmp_path)
    whole = git(tmp_path, "rev-parse", "HEAD")

    assert commit(package) == whole[:12]
    (package / "code.py").write_text("two\n")
    assert commit(package) == f"{whole[:12]}-dirty"


def test_a_package_in_the_checkout_of_something_else_names_no_commit(tmp_path):
    other = checkout(tmp_path)
    package = other / "venv" / "site-packages" / "sylvan"
    package.mkdir(parents=True)

    assert commit(package) is None
