"""Java processes that tests start: each is over before the thorough compiler pays."""

QUICK_JAVA = {"JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
"""For the environment of a process that starts Java."""
