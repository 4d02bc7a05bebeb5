"""The runtime of controllers, as the daemon sees it: start it, exchange messages with it, restart it, store modules in it."""
