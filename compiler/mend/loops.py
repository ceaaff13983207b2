from compiler.mend.function import Function
def loops(function: Function) -> None:
    pass
