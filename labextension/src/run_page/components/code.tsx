import type { RunPage } from "../records";

const SESSION_CODE = "Each cell of the session is a run of its own, whose page has its code.";
const UNSENT_CODE = "The function is in an installed or imported module: its source was not sent.";

/** The code that the ranks ran, and, collapsed, the other cells whose functions were sent to them. */
export function Code({ page }: { page: RunPage }) {
  const [first, ...others] = page.code;
  return (
    <section class="sgpu-page-code" aria-label="code">
      <h3>Code</h3>
      {first ? (
        <figure>
          <figcaption>{first.title}</figcaption>
          <pre>
            {page.magic_line && <span class="sgpu-magic-line">{`${page.magic_line}\n`}</span>}
            {first.text}
          </pre>
        </figure>
      ) : (
        <p class="sgpu-plain">{page.kind === "session" ? SESSION_CODE : UNSENT_CODE}</p>
      )}
      {others.map((part, index) => (
        <details key={index}>
          <summary>{part.title}</summary>
          <pre>{part.text}</pre>
        </details>
      ))}
    </section>
  );
}
