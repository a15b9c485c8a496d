"""`ringcore top`: what an engine does, in the terminal.

    EngineSource (admin calls) ─Sample─▶ Monitor (history, silence, death) ─View─▶ panels (text) ─▶ app, or one picture

The panels and the app know no engine: a test gives them samples.
"""
