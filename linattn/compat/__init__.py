"""The constructors of the packages that this library replaces, with the same arguments."""
