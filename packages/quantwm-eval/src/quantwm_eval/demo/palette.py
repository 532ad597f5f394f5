"""Colours of the room, RGB in [0, 1], and the numbers of its materials."""

BALL_COLOURS: tuple[tuple[float, float, float], ...] = (
    (0.95, 0.10, 0.10),
    (0.10, 0.80, 0.15),
    (0.10, 0.20, 0.95),
    (0.98, 0.88, 0.10),
    (0.90, 0.15, 0.85),
    (0.10, 0.85, 0.90),
)
WALL_COLOURS: tuple[tuple[float, float, float], ...] = (
    (0.66, 0.58, 0.50),
    (0.50, 0.60, 0.66),
    (0.56, 0.64, 0.50),
    (0.66, 0.52, 0.58),
    (0.56, 0.52, 0.68),
    (0.62, 0.62, 0.62),
)
# What each of the four walls makes of the tint, north, east, south, west: no two look alike, from wherever one stands.
WALL_HUES: tuple[tuple[float, float, float], ...] = (
    (1.15, 1.00, 0.50),
    (0.40, 0.85, 1.70),
    (1.75, 0.60, 0.45),
    (0.45, 1.15, 0.60),
)
FLOOR_COLOURS: tuple[tuple[float, float, float], ...] = (
    (0.42, 0.34, 0.28),
    (0.30, 0.34, 0.42),
    (0.30, 0.40, 0.32),
    (0.36, 0.36, 0.36),
)
FURNITURE_COLOURS: tuple[tuple[float, float, float], ...] = (
    (0.40, 0.22, 0.10),  # door
    (0.62, 0.82, 0.98),  # window
    (0.88, 0.55, 0.22),  # picture: frame
    (0.16, 0.26, 0.50),  # picture: canvas
    (1.00, 0.96, 0.72),  # lamp
    (0.80, 0.78, 0.70),  # light pillar
    (0.16, 0.13, 0.20),  # dark pillar
)
DOOR, WINDOW, FRAME, CANVAS, LAMP, FIRST_PILLAR, _ = range(7)
FIRST_WALL, FLOOR, CEILING, FIRST_BALL = 7, 11, 12, 13
