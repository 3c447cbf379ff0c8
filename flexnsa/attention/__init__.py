"""Three implementations of the same four functions: ``reference``, ``sdpa`` and ``flex``. None imports another."""
