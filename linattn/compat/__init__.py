"""The constructors of the systems that this library replaces, argument for argument, mapped to our configuration."""
