"""The subcommands of `hsnb` that no other module holds: one file each."""
