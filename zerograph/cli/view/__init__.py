"""The views of plan files for ``zerograph show`` and ``zerograph diff``, before they are written anywhere."""
