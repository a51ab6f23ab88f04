"""Several of Inductor's C++ kernels in one source, so that one compilation makes the libraries of all of them.

Inductor makes a Python extension of each kernel. Nearly all of its compilation is the same for an empty kernel: the
templates of torch's vectors, and the linker. Fourteen kernels took 8.6 s of CPU one by one and 1.5 s as one source.
"""

from __future__ import annotations

from collections.abc import Mapping

_INCLUDE = "#include"


def joined(sources: Mapping[str, str]) -> str:
    """The C++ of a Python extension that holds every kernel of ``sources``: by a key, the C++ of an extension whose
    one function is called ``kernel``, as Inductor writes it.

    Which one it is loaded as is in its module's name, ``KEY.kernel``: then that kernel is its function ``kernel``.
    """
    lines = {key: source.splitlines() for key, source in sources.items()}
    # In their order, each once, outside of the namespaces.
    includes = dict.fromkeys(line for source in lines.values() for line in source if _is_include(line))
    parts = [_PREAMBLE, *includes]
    for number, source in enumerate(lines.values()):
        body = "\n".join(line for line in source if not _is_include(line))
        parts.append(_KERNEL.format(number=number, body=body))
    entries = "".join(f'    {{"{key}.", PyInit_kernel_{number}}},\n' for number, key in enumerate(lines))
    return "\n".join([*parts, _MODULE.replace("ENTRIES", entries)])


def _is_include(line: str) -> bool:
    return line.lstrip().startswith(_INCLUDE)


_PREAMBLE = "#define PY_SSIZE_T_CLEAN"

# Functions with C names are the same in every namespace, so those two get names of their own.
_KERNEL = """
#define kernel kernel_{number}
#define PyInit_kernel PyInit_kernel_{number}
namespace zerograph_{number} {{
{body}
}}
#undef kernel
#undef PyInit_kernel
using zerograph_{number}::PyInit_kernel_{number};
"""

# Python initializes a module in two phases where it has to know its name. The kernel's own module lives on with it.
_MODULE = """
#include <cstring>

namespace {

const struct { const char* prefix; PyObject* (*init)(); } zerograph_kernels[] = {
ENTRIES};

int zerograph_choose(PyObject* module) {
    const char* name = PyModule_GetName(module);
    if (name == nullptr) return -1;
    for (const auto& each : zerograph_kernels) {
        if (std::strncmp(name, each.prefix, std::strlen(each.prefix)) != 0) continue;
        PyObject* own = each.init();
        if (own == nullptr) return -1;
        PyObject* function = PyObject_GetAttrString(own, "kernel");
        Py_DECREF(own);
        if (function == nullptr) return -1;
        const int failed = PyModule_AddObjectRef(module, "kernel", function);
        Py_DECREF(function);
        return failed;
    }
    PyErr_Format(PyExc_ImportError, "no kernel of this library is called %s", name);
    return -1;
}

PyModuleDef_Slot zerograph_slots[] = {
    {Py_mod_exec, reinterpret_cast<void*>(zerograph_choose)},
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, nullptr}};

PyModuleDef zerograph_module = {
    PyModuleDef_HEAD_INIT, "kernel", nullptr, 0, nullptr, zerograph_slots, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_kernel(void) { return PyModuleDef_Init(&zerograph_module); }
"""
