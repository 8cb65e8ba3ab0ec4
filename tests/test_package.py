"""What ``import rotoscope`` gives, and what it must not drag in."""

from __future__ import annotations

import subprocess
import sys

import rotoscope as rs


def _python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_import_is_light() -> None:
    heavy = _python(
        "import sys, rotoscope\n"
        "print(sorted({'torch', 'transformers', 'pandas', 'numpy', 'altair', 'typer'} & set(sys.modules)))"
    )
    assert heavy == "[]\n"


def test_every_name_is_there_and_no_other() -> None:
    assert [name for name in rs.__all__ if getattr(rs, name, None) is None] == []
    assert set(rs.__all__) <= set(dir(rs))
    assert not hasattr(rs, "nonsense")


def test_doctor_stays_a_function_when_its_module_is_imported_first() -> None:
    assert _python("import rotoscope.doctor, rotoscope as rs; print(type(rs.doctor).__name__)") == "function\n"
