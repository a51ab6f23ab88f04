"""What ``zerograph show`` and ``zerograph diff`` make of plan files, before it is written anywhere."""
