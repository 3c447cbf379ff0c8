"""Checks of user input: ``primitives`` check one value, ``calls`` the arguments of a public function."""
