"""Functions whose parameters are data, so that options that many of them have are written once."""

import functools
import inspect

#: The default of a parameter that has none.
REQUIRED = inspect.Parameter.empty


def required(*names):
    """Parameters without a default."""
    return dict.fromkeys(names, REQUIRED)


def takes(parameters, extra=None, renamed={}):
    """Decorator: the function is called with `parameters`, {name: default} in their order, and gets all of them by
    name; those of `renamed` by their new one.

    extra: the name by which it gets a dictionary of the keywords that are no parameters; without it they raise
    TypeError, as a missing argument does.
    """
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    listed = [inspect.Parameter(name, kind, default=default) for name, default in parameters.items()]
    if extra:
        listed.append(inspect.Parameter(extra, inspect.Parameter.VAR_KEYWORD))
    signature = inspect.Signature(listed)
    names, needed = list(parameters), [name for name, default in parameters.items() if default is REQUIRED]
    own_names = [renamed.get(name, name) for name in names]
    renamed = {name: own for name, own in zip(names, own_names) if name != own}

    def decorate(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            others = {}
            if kwargs or len(args) != len(names):
                found = {**parameters, **dict(zip(names, args)), **kwargs} if args else {**parameters, **kwargs}
                missing = len(args) < len(needed) and any(name not in kwargs for name in needed[len(args) :])
                twice = args and kwargs and any(name in kwargs for name in names[: len(args)])
                if missing or twice or len(args) > len(names) or (len(found) > len(names) and not extra):
                    _refuse(wrapper, signature, args, kwargs)
                if len(found) > len(names):
                    others = {name: found.pop(name) for name in [*found][len(names) :]}
                for name in renamed:
                    found[renamed[name]] = found.pop(name)
            else:
                found = dict(zip(own_names, args))
            if extra:
                found[extra] = others
            return function(**found)

        wrapper.__signature__ = signature
        return wrapper

    return decorate


def _refuse(function, signature, args, kwargs):
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{function.__qualname__}() {error}") from None
