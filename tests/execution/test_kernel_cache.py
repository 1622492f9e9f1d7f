"""Machine code of CUDA kernels in the cache folder: compiled again for another text, option or compiler."""

import ctypes
from threading import Event, Thread

import pytest

from nanovllm.fast.gpu.option_kernels import call_apart
from nanovllm.fast.kernels import nvrtc


class Compiler:
    """Stands for libnvrtc: its machine code is the source and the options. `version` is its own."""

    def __init__(self):
        self.version = (13, 0)
        self.num_compiled = 0
        self.fails = False
        self._code = b""

    def nvrtcVersion(self, major, minor):
        major._obj.value, minor._obj.value = self.version
        return 0

    def nvrtcCreateProgram(self, program, source, *_):
        self._code = source
        return 0

    def nvrtcCompileProgram(self, program, count, options):
        self.num_compiled += 1
        self._code = b" ".join([self._code, *options])
        return int(self.fails)

    def nvrtcDestroyProgram(self, program):
        return 0

    def nvrtcGetCUBINSize(self, program, size):
        size._obj.value = len(self._code)
        return 0

    def nvrtcGetCUBIN(self, program, buffer):
        ctypes.memmove(buffer, self._code, len(self._code))
        return 0

    nvrtcGetProgramLogSize, nvrtcGetProgramLog = nvrtcGetCUBINSize, nvrtcGetCUBIN


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    own = Compiler()
    monkeypatch.setattr(nvrtc, "_compiler", lambda: own)
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path / "cache"))
    return own


def test_a_text_is_compiled_once_a_machine(compiler):
    code = nvrtc.compile_source("void f();", "sm_90", {"ROWS": 4})
    assert code == b"void f(); --gpu-architecture=sm_90 --std=c++17 -DROWS=4"
    assert nvrtc.compile_source("void f();", "sm_90", {"ROWS": 4}) == code and compiler.num_compiled == 1


@pytest.mark.parametrize(
    "other", [("void g();", "sm_90", {"ROWS": 4}), ("void f();", "sm_90a", {"ROWS": 4}), ("void f();", "sm_90", {})]
)
def test_another_text_device_or_macro_has_code_of_its_own(compiler, other):
    first = nvrtc.compile_source("void f();", "sm_90", {"ROWS": 4})
    assert nvrtc.compile_source(*other) != first and compiler.num_compiled == 2


@pytest.mark.parametrize("version", [(13, 1), (12, 0)])
def test_another_version_of_the_compiler_compiles_again(compiler, version):
    for compiler.version in ((13, 0), version, (13, 0), version):
        nvrtc.compile_source("void f();", "sm_90", {})
    assert compiler.num_compiled == 2


def test_without_a_folder_to_write_to_it_compiles_at_each_start(compiler, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path / "file" / "cache"))
    codes = {nvrtc.compile_source("void f();", "sm_90", {}) for _ in range(2)}
    assert len(codes) == 1 and compiler.num_compiled == 2


def test_a_text_that_does_not_compile_leaves_nothing_behind(compiler, tmp_path):
    compiler.fails = True
    with pytest.raises(nvrtc.CudaError, match="does not compile"):
        nvrtc.compile_source("void", "sm_90", {})
    compiler.fails = False
    assert nvrtc.compile_source("void", "sm_90", {}).startswith(b"void")
    assert compiler.num_compiled == 2


def test_a_text_that_a_thread_compiles_is_waited_for(compiler):
    begun, may_end = Event(), Event()
    compile_program = compiler.nvrtcCompileProgram

    def slow(*arguments):
        begun.set()
        assert may_end.wait(20)
        result = compile_program(*arguments)
        return result

    compiler.nvrtcCompileProgram = slow
    codes = []

    def compile_text():
        codes.append(nvrtc.compile_source("void f();", "sm_90", {}))

    call_apart([compile_text])
    assert begun.wait(20)
    waiting = Thread(target=compile_text)
    waiting.start()
    may_end.set()
    waiting.join(20)
    assert codes == [b"void f(); --gpu-architecture=sm_90 --std=c++17"] * 2 and compiler.num_compiled == 1
