import { describe, expect, it } from "vitest";

import { pieces, plain } from "../src/run_view/ansi";
import { markMatches } from "../src/run_view/components/log_row";

describe("escape sequences", () => {
  it("become styles", () => {
    expect(pieces("\x1b[1;31mbad\x1b[0m good")).toEqual([
      { text: "bad", style: { color: "#e75c58", "font-weight": "bold" } },
      { text: " good", style: undefined },
    ]);
    expect(pieces("\x1b[38;5;208mx")[0]?.style).toEqual({ color: "#ff8700" });
    expect(pieces("\x1b[48;2;1;2;300mx")[0]?.style).toEqual({ background: "#0102ff" });
    expect(pieces("\x1b[7mx")[0]?.style).toEqual({ color: "#ffffff", background: "#6b7280" });
    expect(pieces("\x1b[4;2mx\x1b[22;24my")[1]?.style).toBeUndefined();
  });

  it("are dropped unless they set a style", () => {
    const text = "a\x1b[2Kb\x1b]8;;http://x\x07c\x1b]8;;\x1b\\d\x1b[?25le\x07f\x1b[";
    expect(plain(text)).toBe("abcdef");
    expect(pieces(text).map((piece) => piece.text).join("")).toBe("abcdef");
  });

  it("leave other text unchanged, including HTML", () => {
    const text = '<img src=x onerror="alert(1)"> & \u00e9';
    expect(pieces(text)).toEqual([{ text, style: undefined }]);
    expect(pieces("")).toEqual([]);
  });
});

describe("markMatches", () => {
  it("marks matches across style changes, ignoring case", () => {
    const found = markMatches(pieces("say \x1b[31mHel\x1b[0mlo hello"), "hello");
    expect(found.map(({ text, isMatch }) => [text, isMatch])).toEqual([
      ["say ", false],
      ["Hel", true],
      ["lo", true],
      [" ", false],
      ["hello", true],
    ]);
  });

  it("marks nothing without a match", () => {
    expect(markMatches(pieces("plain"), "x").map(({ isMatch }) => isMatch)).toEqual([false]);
  });
});
